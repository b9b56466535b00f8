"""Common English words that evaluation tasks use."""

CITIES = [
    "Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Moscow", "Tokyo", "Cairo", "Sydney",
    "Chicago", "Boston", "Dublin", "Athens", "Oslo", "Lisbon", "Warsaw", "Prague", "Toronto", "Seattle",
    "Denver", "Delhi", "Lima", "Geneva",
]  # fmt: skip
OBJECTS = [
    "apple", "river", "table", "horse", "garden", "window", "bottle", "paper", "stone", "bridge",
    "flower", "mirror", "basket", "candle", "ladder", "pencil", "blanket", "hammer", "island", "kitchen",
    "engine", "button", "forest", "castle",
]  # fmt: skip

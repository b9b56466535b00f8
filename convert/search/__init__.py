"""Plans searched by measuring them."""

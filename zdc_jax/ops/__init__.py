"""Operations with several implementations behind one function."""

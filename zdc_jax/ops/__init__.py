"""Operations that choose among several implementations."""

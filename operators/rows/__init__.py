"""Operators that filter rows, or report on them."""

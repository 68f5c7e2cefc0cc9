"""Where nodes run: places, their slots, and turns on a slot."""

"""Processes that hold the weights of a model together, and the passes of a mini-batch on them."""

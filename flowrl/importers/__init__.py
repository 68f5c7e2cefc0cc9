"""Configurations of verl, TRL and OpenRLHF, read without running anything, and written as a training of flowrl."""

"""Training on megatron-core: layers split by its tensor parallelism, and in stages of its pipeline. Experimental."""

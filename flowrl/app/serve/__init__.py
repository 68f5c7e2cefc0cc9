"""``flowrl serve``: a policy behind the endpoint that programs play episodes with."""

"""Reset samplers: which configuration of the reset bank each world starts from. One sampler, one file."""

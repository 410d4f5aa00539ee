"""A simulated server: the wire format of vLLM, TGI or LightLLM, with tokens timed by a clock of our choosing."""

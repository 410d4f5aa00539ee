"""What servers, GPUs and hosts report about themselves while a run is on: beside the load, never in its path."""

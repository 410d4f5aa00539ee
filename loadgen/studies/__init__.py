"""Studies plan, make and evaluate several runs: capacity searches, sweeps, matrices and simulated servers."""

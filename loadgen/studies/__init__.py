"""Studies of several runs: each one plans runs, makes them and judges them."""

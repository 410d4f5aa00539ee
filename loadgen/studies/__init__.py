"""Studies of several runs: capacity searches, sweeps, matrices and fits of twins.

A twin is a simulated server that is fitted to a measured server.
"""

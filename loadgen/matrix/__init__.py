"""The matrix: servers x hosts x models x workloads, each measured several times, in one command.

Two nouns that a single run does not need. A *cell* is one server on one host with one model under one workload; what
is compared with one another are cells. A *start* is one server coming up, serving the runs of its cells, and going
down again; runs that share a start share whatever that process has warmed up.

    plan      what is to be measured: one TOML file, all mistakes at once
    cells     which cells that makes, and in which order they are measured
    state     what has been measured already: the run files themselves, and matrix.jsonl
    estimate  how long the rest will take
    run       measures it
"""

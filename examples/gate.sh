#!/bin/sh
# Uses a burst as a check: it passes if every request was complete and the client kept up.
#
#   examples/gate.sh tgi --url http://127.0.0.1:8002
#
# The first argument is the server. All others are passed to `loadgen burst`. --real: a simulated server passes no check.
set -u

server=$1
shift
loadgen burst --server "$server" --real --quiet "$@"
case $? in
    0) echo "pass: every request was complete, or as many as --assert requires" ;;
    1) echo "fail: some requests failed or were truncated"; exit 1 ;;
    4) echo "fail: an objective (--assert) is not met"; exit 1 ;;
    5) echo "void: the client was the limit, so the figures do not describe the server"; exit 1 ;;
    6) echo "void: too few requests to decide an objective (--assert)"; exit 1 ;;
    *) echo "void: nothing was measured"; exit 1 ;;
esac

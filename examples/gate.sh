#!/bin/sh
# A burst as a check: passes when every request was complete and the client kept up.
#
#   examples/gate.sh tgi --url http://127.0.0.1:8002
#
# The first argument is the server, the rest goes to `loadgen burst`.
set -u

server=$1
shift
loadgen burst --server "$server" --quiet "$@"
case $? in
    0) echo "pass: every request was complete, or as many as an --assert asks for" ;;
    1) echo "fail: some requests failed or were truncated"; exit 1 ;;
    4) echo "fail: an --assert does not hold"; exit 1 ;;
    5) echo "void: the client was the limit, which says nothing about the server"; exit 1 ;;
    6) echo "void: too few requests to tell whether an --assert holds"; exit 1 ;;
    *) echo "void: nothing was measured"; exit 1 ;;
esac

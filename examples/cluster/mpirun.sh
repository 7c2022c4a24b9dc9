#!/bin/bash
# feedline train under Open MPI: one process for each GPU of the machine, or of the hosts in HOSTS.
#
#   examples/cluster/mpirun.sh
#   PROCESSES=16 HOSTS=dgx1:8,dgx2:8 examples/cluster/mpirun.sh --epochs 10
#
set -euo pipefail

FEEDLINE=${FEEDLINE:-.venv/bin/feedline}
PROCESSES=${PROCESSES:-8}

# --bind-to none: by default mpirun binds each process to some cores, which leaves it few reading threads.
# Process 0 must run on the host of mpirun, as it does if that host comes first; else name its host by
# -x FEEDLINE_COORDINATOR=host:port.
# odls_base_sigkill_timeout: after SIGTERM or Ctrl-C mpirun waits so many seconds, sends SIGTERM to the processes, waits
# as many again, and kills them. The default of 1 s is too short to save a checkpoint (--checkpoint-dir).
exec mpirun -n "$PROCESSES" --bind-to none --mca odls_base_sigkill_timeout 15 ${HOSTS:+--host "$HOSTS"} ${MPIRUN_OPTIONS:-} \
  "$FEEDLINE" train --mode jit_multi --batch-size 4096 "$@"

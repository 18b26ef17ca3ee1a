#!/bin/bash
# Stops what up.sh started, by the recorded process ids, and removes LAB.
set -u
PATH=$PATH:/usr/sbin:/sbin; export SLURM_CONF=$LAB/slurm.conf
[ -d "$LAB" ] || exit 0
gone() { for _ in $(seq "$2"); do kill -0 "$1" 2>/dev/null || return 0; sleep 0.1; done; return 1; }
if [ -s "$LAB/ctld.pid" ] && kill -0 "$(cat "$LAB/ctld.pid")" 2>/dev/null; then
  jobs=$(squeue -h -o %A 2>/dev/null | sort -u); [ -z "$jobs" ] || scancel $jobs 2>/dev/null
  for _ in $(seq 100); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
fi
for file in "$LAB"/n*.pid "$LAB/ctld.pid" "$LAB/munge/pid"; do
  [ -s "$file" ] && kill -TERM "$(cat "$file")" 2>/dev/null
done
for file in "$LAB"/n*.pid "$LAB/ctld.pid" "$LAB/munge/pid"; do
  [ -s "$file" ] || continue
  gone "$(cat "$file")" 30 || kill -KILL "$(cat "$file")" 2>/dev/null
done
# what jobs of this cluster left behind: step daemons that outlived their slurmd, and processes of tasks
for process in /proc/[0-9]*; do
  { tr '\0' '\n' < "$process/environ"; } 2>/dev/null | grep -qx "SLURM_CONF=$LAB/slurm.conf" || continue
  id=${process#/proc/}
  [ "$id" = $$ ] || ! grep -qaE 'slurm|holdfast' "$process/cmdline" 2>/dev/null || kill -KILL "$id" 2>/dev/null
done
rm -rf "$LAB"

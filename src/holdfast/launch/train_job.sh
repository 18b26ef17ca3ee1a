RUN=@RUN@
ITERATIONS=@ITERATIONS@
MAX_REQUEUES=@MAX_REQUEUES@
RESTARTS=${SLURM_RESTART_COUNT:-0}

record() { # event, detail: a line for people, and one for `holdfast launch status`
  echo "holdfast: job $SLURM_JOB_ID: $1: $2"
  printf '{"time":%s,"event":"%s","job":"%s","restart":%s,"detail":"%s"}\n' \
    "$(date +%s)" "$1" "$SLURM_JOB_ID" "$RESTARTS" "$2" >> "$RUN/launch/jobs.jsonl"
}
got_somewhere() { [ "$RUN/metrics.jsonl" -nt "$RUN/launch/.started" ]; } # an iteration since this start
finished() { # the run ended, and at its last step
  local step
  step=$(grep -oE '"event":"finished","step":[0-9]+' "$RUN/events.jsonl" 2>/dev/null | tail -n 1)
  [ "${step##*:}" = "$ITERATIONS" ]
}
come_back() { # why: unless the job came back too often, or was cancelled meanwhile
  if [ "$RESTARTS" -ge "$MAX_REQUEUES" ]; then record "gave up" "$1, and none of $MAX_REQUEUES requeues is left"; exit 1; fi
  scontrol show job -o "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING' || exit 0
  record requeued "$1"
  scontrol requeue "$SLURM_JOB_ID" || exit 1
  exit 0
}

if [ "$RESTARTS" -gt "$MAX_REQUEUES" ]; then
  record "gave up" "this is start $((RESTARTS + 1)), and $MAX_REQUEUES requeues are allowed"
  exit 1
fi
# a request that the start before this one did not live to honour
[ "$RESTARTS" = 0 ] || rm -f "$RUN/persist"
@SETUP@
NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
# another port for each start: ranks of an earlier one, on a node that only lost its slurmd, must not meet those of this one
export MASTER=${NODES[0]} PORT=$((20000 + (SLURM_JOB_ID * 32 + RESTARTS) % 10000))
touch "$RUN/launch/.started"
record started "@RESOLVED@, on ${NODES[*]}, master $MASTER:$PORT"

@FETCH@

# The shell must be free to hear signals, so the step runs in the background. USR1 comes before the time limit: the run is asked
# to persist and stop, and made to if it does not. TERM comes with scancel, preemption and requeue: the step has got its own.
TIME_IS_UP=
time_is_up() {
  TIME_IS_UP=1
  touch "$RUN/persist"
  (sleep @PATIENCE@; kill -TERM "$STEP") 2>/dev/null &
}
trap time_is_up USR1
INTERRUPTED=
trap 'INTERRUPTED=1' TERM
@TRAIN@ &
STEP=$!
while :; do
  wait "$STEP"
  CODE=$?
  kill -0 "$STEP" 2>/dev/null || break
done

if finished; then record finished "all iterations are done"; exit 0; fi
[ -z "$TIME_IS_UP" ] || come_back "the time limit is near"
if [ -n "$INTERRUPTED" ]; then record interrupted "Slurm ends this start: cancelled, preempted or requeued"; exit 1; fi
if [ "$CODE" = 0 ]; then record stopped "persisted on request; holdfast launch resume $RUN goes on"; exit 0; fi
# A run that fails without one more iteration would only fail again.
! got_somewhere || come_back "training failed with code $CODE"
record failed "training failed with code $CODE"
exit "$CODE"

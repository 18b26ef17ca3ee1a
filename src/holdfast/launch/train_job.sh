RUN=@RUN@
ITERATIONS=@ITERATIONS@
MAX_REQUEUES=@MAX_REQUEUES@
RESTARTS=${SLURM_RESTART_COUNT:-0}

record() { # event, detail: prints a line, and appends a record for `holdfast launch status`
  echo "holdfast: job $SLURM_JOB_ID: $1: $2"
  printf '{"time":%s,"event":"%s","job":"%s","restart":%s,"detail":"%s"}\n' \
    "$(date +%s)" "$1" "$SLURM_JOB_ID" "$RESTARTS" "${2//\"/\\\"}" >> "$RUN/launch/jobs.jsonl"
}
made_progress() { [ "$RUN/metrics.jsonl" -nt "$RUN/launch/.started" ]; } # an iteration since this start
finished() { # the run ended, and at its last step
  local step
  step=$(grep -oE '"event":"finished","step":[0-9]+' "$RUN/events.jsonl" 2>/dev/null | tail -n 1)
  [ "${step##*:}" = "$ITERATIONS" ]
}
requeue() { # reason; exits instead if no requeue is left, or if the job was cancelled meanwhile
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
# a request to persist that the previous start left behind
[ "$RESTARTS" = 0 ] || rm -f "$RUN/persist"
@SETUP@
NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
# Each start has its own port: ranks of an earlier start, on a node that only lost its slurmd, must not connect to this one.
export MASTER=${NODES[0]} PORT=$((20000 + (SLURM_JOB_ID * 32 + RESTARTS) % 10000))
touch "$RUN/launch/.started"
record started "@RESOLVED@, on ${NODES[*]}, master $MASTER:$PORT"

@FETCH@

# The step runs in the background, so that the shell can handle signals. USR1 comes before the time limit: the run is asked to
# persist and stop, and is terminated if it does not. TERM comes with scancel, preemption and requeue; Slurm sends it to the step too.
TIME_IS_UP=
TIMER=
time_is_up() {
  TIME_IS_UP=1
  touch "$RUN/persist"
  # a builtin that waits: killing the timer leaves no `sleep` behind
  (read -rt @STOP_SECONDS@ <> <(:); kill -TERM "$STEP") 2>/dev/null &
  TIMER=$!
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
[ -z "$TIMER" ] || kill "$TIMER" 2>/dev/null

if finished; then record finished "all iterations are done"; exit 0; fi
[ -z "$TIME_IS_UP" ] || requeue "the time limit is near"
if [ -n "$INTERRUPTED" ]; then record interrupted "Slurm ends this start: cancelled, preempted or requeued"; exit 1; fi
if [ "$CODE" = 0 ]; then record stopped "persisted on request; holdfast launch resume $RUN continues it"; exit 0; fi
# A run that fails without one more iteration would only fail again.
! made_progress || requeue "training failed with code $CODE"
record failed "training failed with code $CODE"
exit "$CODE"

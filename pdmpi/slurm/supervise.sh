# The part of a batch script that starts a run, tells it to stop, and requeues it.
#
# bash; included by `pdmpi submit`, sourced by slurm/train.sbatch. Expects
#   run_dir        the run's directory
#   command        array: the launcher and what every rank runs
#   max_restarts   times that the job is requeued at most
#   max_deaths     deaths in a row without a new checkpoint after which it is not
#   stopped_early  the signal that came meanwhile, if any

restarts=${SLURM_RESTART_COUNT:-0}
echo "== job $SLURM_JOB_ID, start $restarts, $(date -Is), $SLURM_JOB_NODELIST"

# A launcher's exit code is not to be trusted (mpirun returns 0 when a daemon dies): rank 0
# writes how this start of this job stands. What dies leaves it "running", or says nothing.
status() {
  sed -n 's/^{"status": "\([a-z]*\)".*"job": "'"$SLURM_JOB_ID"'", "restarts": '"$restarts"'}$/\1/p' \
    "$run_dir/status.json" 2>/dev/null
}
# Somebody ended the job before its time; nobody wants it back.
cancelled() {
  [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T 2>/dev/null)" = COMPLETING ] &&
    { [ -z "$limit" ] || [ "$(date +%s)" -lt $((limit - 5)) ]; }
}
newest() { ls "$run_dir/checkpoints" 2>/dev/null | grep '^step-' | tail -n 1; }
alive() { [ -n "$launcher" ] && kill -0 "$launcher" 2>/dev/null; }

# Whatever tells this job to stop, the ranks hear USR1, once they are ready for it: they
# checkpoint and end. (mpirun would kill them at TERM, and other nodes would never see it.)
stop() {
  echo "== $1: asking the ranks to checkpoint and stop"
  [ -n "$launcher" ] || stopped_early=$1
  (while alive && [ "$(status)" != running ]; do sleep 0.2; done; alive && kill -USR1 "$launcher") &
}
launcher=
trap 'stop USR1' USR1
trap 'stop USR2' USR2
trap 'stop TERM' TERM
[ -z "${stopped_early:-}" ] || echo "== $stopped_early before the start"

limit=$(SLURM_TIME_FORMAT=standard squeue -h -j "$SLURM_JOB_ID" -o %e 2>/dev/null)
limit=$(date -d "${limit:-none}" +%s 2>/dev/null)
before=$(newest)
code=0
if [ -z "${stopped_early:-}" ]; then
  "${command[@]}" &
  launcher=$!
fi
while alive; do
  wait "$launcher"
  code=$?
done
status=$(status)
echo "== launcher returned $code, the run is ${status:-silent}"

case $status in
  done) exit 0 ;;
  failed) exit $((code ? code : 1)) ;;
esac
[ "$code" = 2 ] && exit 2
if cancelled; then
  echo "== cancelled: not requeued"
  exit $((code ? code : 1))
fi
if [ "$restarts" -ge "$max_restarts" ]; then
  echo "== requeued $restarts times already (max_restarts = $max_restarts): giving up"
  exit $((code ? code : 1))
fi

# A run that dies again and again without getting further has a fault that no restart cures.
deaths=0
if [ "$status" != requeue ] && [ -z "${stopped_early:-}" ] && [ "$(newest)" = "$before" ]; then
  deaths=$(($(cat "$run_dir/deaths" 2>/dev/null || echo 0) + 1))
fi
echo "$deaths" > "$run_dir/deaths"
if [ "$deaths" -gt "$max_deaths" ]; then
  echo "== died $deaths times without a new checkpoint (max_deaths = $max_deaths): giving up"
  rm -f "$run_dir/deaths"
  exit $((code ? code : 1))
fi
echo "== requeued"
trap - TERM USR1 USR2
scontrol requeue "$SLURM_JOB_ID" && sleep 60
exit 75

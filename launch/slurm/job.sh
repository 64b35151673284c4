# What every job written by `python -m launch.slurm` does: starts its sides, waits for the first end of one, ends the
# others. Sourced by the sbatch scripts in the checkout; needs bash 4.4. `run` is the run directory.

set -uo pipefail
set -m # every side leads a process group, which is ended as a whole
export PYTHONUNBUFFERED=1
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}" # since Slurm 22.05 srun does not take it over from sbatch

PATIENCE_S=90 # launch.up gives the trainer half a minute, then the servers 20 s
names=() pids=() logs=() resume=() asked=""
trap 'asked=USR1' USR1
trap 'asked=TERM' TERM INT

say() { echo "$(date '+%F %T') $*"; }

newest() { # the newest checkpoint of the run; one exists under its name only when it is whole
  find "$run/checkpoints" -maxdepth 1 -name 'step-*' 2> /dev/null | sort | tail -n 1
}

prepare() { # continue the run when it has a checkpoint
  before="$(newest)"
  if [[ -n $before ]]; then
    resume=(--resume)
    say "continuing $run from $before"
  elif [[ -e $run/base.json && ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then
    # This job was ended before the first checkpoint: there is nothing to continue, and the trainer refuses the rest.
    mv "$run" "$run.restart-$SLURM_JOB_ID-$SLURM_RESTART_COUNT"
    say "starting anew: the job was ended before its first checkpoint"
  fi
}

start() { # start NAME COMMAND…: in the background, with a log of its own
  local log="$SLURM_JOB_NAME-$SLURM_JOB_ID-$1.log"
  names+=("$1") logs+=("$log")
  shift
  "$@" >> "$log" 2>&1 < /dev/null &
  pids+=($!)
  say "started ${names[-1]}, log $log"
}

lives() { kill -0 "$1" 2> /dev/null; }

end_all() { # SIGTERM to every side, SIGKILL after PATIENCE_S
  local pid second
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2> /dev/null; done
  for ((second = 0; second < PATIENCE_S; second++)); do
    for pid in "${pids[@]}"; do
      if lives "$pid"; then
        sleep 1
        continue 2
      fi
    done
    break
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2> /dev/null; done
}

finish() { # wait for the first end; the exit code is that side's, and 0 only when the run is done
  local side ended=() codes=()
  while [[ -z $asked ]]; do
    ended=()
    for side in "${!pids[@]}"; do lives "${pids[side]}" || ended+=("$side"); done
    ((${#ended[@]} == 0)) || break
    sleep 1
  done
  if [[ -n $asked ]]; then
    stop
  fi
  for side in "${ended[@]}"; do
    wait "${pids[side]}"
    codes[side]=$?
  done
  end_all
  for side in "${ended[@]}"; do
    if [[ ${names[side]} != servers && ${codes[side]} -eq 0 ]]; then
      say "${names[side]}: done"
      exit 0
    fi
  done
  side="${ended[0]}"
  say "error: ${names[side]} ended first, with exit code ${codes[side]}; the last lines of ${logs[side]}:"
  tail -n 30 "${logs[side]}"
  exit "$((codes[side] == 0 ? 1 : codes[side]))"
}

stop() { # Slurm's signal: SIGUSR1 before the time limit, SIGTERM of scancel and of preemption
  say "SIG$asked: ending ${names[*]}"
  end_all
  [[ $asked == USR1 ]] || exit 143
  if [[ "$(newest)" == "$before" ]]; then
    say "error: no checkpoint was written since this start, so the job is not queued again." \
      "Raise --time, or lower train.save_steps."
    exit 1
  fi
  say "queued again, to continue from $(newest)"
  scontrol requeue "$SLURM_JOB_ID"
  exit
}

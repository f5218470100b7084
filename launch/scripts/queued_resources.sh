# Asks for the slices, copies the code, starts a worker on every host and follows them; after a preemption it asks again
# and the run goes on. At the end, also a failed one, the machines are deleted.
#
#   bash launch.sh           all of that; Ctrl-C stops the run, which saves a snapshot, and deletes the machines
#   bash launch.sh follow    shows what the workers print, from the beginning
#   bash launch.sh stop      stops the workers
#   bash launch.sh delete    deletes the machines

poll=${JAXRL_POLL_SECONDS:-30}
watch=${JAXRL_WATCH_SECONDS:-3}
private=
launched=
followers=
kept=$out # logs and exit codes of workers

say() { printf '[launch] %s\n' "$*"; }
tpus() { gcloud compute tpus "$@" "${where[@]}"; }

on() { # node, worker or all, command; notices within two minutes when the machine has gone
  gcloud compute tpus tpu-vm ssh "$1" "${where[@]}" --worker="$2" --command "$3" -- \
    -o ServerAliveInterval=30 -o ServerAliveCountMax=4 </dev/null
}

pause() { # so that a signal is not kept waiting
  sleep "$1" &
  wait $! || true
}

end_followers() {
  local follower
  for follower in $followers; do kill -TERM -- "-$follower" 2>/dev/null || true; done
}

again() { # a few tries: a new machine refuses connections until its keys are there
  local try
  for try in 1 2 3 4 5; do
    if "$@"; then return 0; fi
    say "try $try failed: $1 $2"
    pause "$poll"
  done
  return 1
}

state() {
  local answer
  if answer=$(tpus queued-resources describe "$name" --format='value(state.state)' 2>&1); then
    printf '%s\n' "${answer##*$'\n'}" # warnings may come before it
  else
    case $answer in
      *NOT_FOUND* | *'not found'*) echo MISSING ;;
      *) echo UNKNOWN ;;
    esac
  fi
}

delete_machines() {
  if [ "$(state)" != MISSING ]; then
    say "deleting $name"
    tpus queued-resources delete "$name" --force --quiet
  fi
}

await_active() { # 0: ACTIVE; 1: it will not be
  local now before=
  while :; do
    now=$(state)
    if [ "$now" != "$before" ]; then say "$name is $now"; fi
    before=$now
    case $now in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDED | SUSPENDING | DELETING | MISSING) return 1 ;;
    esac
    pause "$poll"
  done
}

pack() { # the files of the repository, without what git ignores
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' path; do if [ -e "$path" ]; then printf '%s\0' "$path"; fi; done |
    tar --null -T - -czf "$out/code.tgz"
}

write_secrets() { # into a file that nobody else can read
  local secret
  : >"$private/secrets.sh"
  for secret in ${secrets[@]+"${secrets[@]}"}; do
    printf 'export %s=%q\n' "$secret" "${!secret}" >>"$private/secrets.sh"
  done
}

set_up() {
  local node
  pack || return 1
  write_secrets || return 1
  for node in "${nodes[@]}"; do
    again on "$node" all 'mkdir -p jaxrl && chmod 700 jaxrl' || return 1
    again tpus tpu-vm scp "$out/code.tgz" "$out/worker.sh" "$private/secrets.sh" "$node:jaxrl/" --worker=all || return 1
    on "$node" all 'bash jaxrl/worker.sh setup' || return 1
  done
}

start_workers() {
  local node
  launched=true
  for node in "${nodes[@]}"; do on "$node" all 'bash jaxrl/worker.sh start' || return 1; done
}

stop_workers() { # SIGTERM on every host at the same time; comes back when all have ended
  local node pids=
  for node in "${nodes[@]}"; do
    on "$node" all 'bash jaxrl/worker.sh stop' >/dev/null 2>&1 &
    pids="$pids $!"
  done
  wait $pids || true
}

follow_worker() { # node, worker: shows and keeps its output; leaves its exit code, or "lost", in a file
  local log="$kept/logs/$1-$2.log" result="$kept/exit/$1-$2" line from now
  touch "$log"
  while :; do
    from=$(($(wc -l <"$log") + 1))
    on "$1" "$2" "bash jaxrl/worker.sh follow $from" 2>>"$kept/logs/ssh.txt" |
      while IFS= read -r line; do
        case $line in
          '##exit '*) printf '%s\n' "${line#'##exit '}" >"$result" ;;
          *)
            printf '%s\n' "$line" >>"$log"
            printf '[%s-%s] %s\n' "$1" "$2" "$line"
            ;;
        esac
      done || true
    if [ -s "$result" ]; then return 0; fi
    now=$(state)
    case $now in
      ACTIVE | UNKNOWN) sleep "$poll" ;; # the connection was lost, the machine is there
      *)
        say "$1-$2 is lost: $name is $now"
        echo lost >"$result"
        return 0
        ;;
    esac
  done
}

follow() { # sets code: 0, or that of the first worker that failed, or lost
  local node worker file first= ended
  rm -rf "$kept/exit" && mkdir -p "$kept/exit" "$kept/logs"
  for node in "${nodes[@]}"; do
    for ((worker = 0; worker < hosts; worker++)); do
      set -m # a process group of its own, so that it can be ended with all its parts
      follow_worker "$node" "$worker" &
      set +m
      followers="$followers $!"
    done
  done
  while :; do
    ended=0
    for file in "$kept"/exit/*; do
      if [ -s "$file" ]; then
        ended=$((ended + 1))
        if [ -z "$first" ] && [ "$(cat "$file")" != 0 ]; then
          first=$(cat "$file")
          say "${file##*/} ended with $first; the others are told to end"
          stop_workers
        fi
      fi
    done
    if [ "$ended" -ge $((${#nodes[@]} * hosts)) ]; then break; fi
    pause "$watch"
  done
  wait $followers || true
  followers=
  code=${first:-0}
}

finish() {
  if [ "$keep" = true ]; then
    say "$name is kept; delete it with: bash $out/launch.sh delete"
  else
    delete_machines || say "could not delete $name; delete it with: bash $out/launch.sh delete"
  fi
}

interrupted() {
  local file
  trap '' TERM # may come twice: to this process, and to its group
  trap 'say "left as it is; delete $name with: bash $out/launch.sh delete"; exit 130' INT
  if [ -z "$launched" ]; then
    finish
    exit 130
  fi
  say "stopping: the workers have $grace s to save a snapshot"
  stop_workers
  if [ -n "$followers" ]; then wait $followers || true; else follow; fi
  code=75
  for file in "$kept"/exit/*; do
    case $(cat "$file") in
      0 | 75 | 143 | lost) ;;
      *) code=$(cat "$file") ;;
    esac
  done
  finish
  exit "$code"
}

start() {
  local restarts=0 now
  private=$(mktemp -d)
  chmod 700 "$private"
  trap 'end_followers; rm -rf "$private"' EXIT
  trap interrupted INT TERM
  while :; do
    code=
    now=$(state)
    case $now in FAILED | SUSPENDED | SUSPENDING) delete_machines ;; esac
    case $now in FAILED | SUSPENDED | SUSPENDING | MISSING) "${create[@]}" "${where[@]}" ;; esac
    if await_active; then
      if set_up && start_workers; then
        follow
      elif [ "$(state)" = ACTIVE ]; then
        say 'the set-up failed'
        code=1
      else
        code=lost
      fi
    elif [ "$(state)" = FAILED ]; then
      tpus queued-resources describe "$name" || true
      code=1
    else
      code=lost
    fi
    case $code in
      lost | 75 | 143)
        if [ "$restarts" -ge "$max_restarts" ]; then
          say "stopped after $restarts restarts"
          finish
          exit 75
        fi
        restarts=$((restarts + 1))
        say "preempted; restart $restarts of $max_restarts"
        pause "$poll"
        ;;
      *)
        finish
        exit "$code"
        ;;
    esac
  done
}

mkdir -p "$out/logs"
trap end_followers EXIT
case ${1:-start} in
  start) start ;;
  follow) # from the first line, beside whoever keeps the logs
    kept=$(mktemp -d)
    trap 'end_followers; rm -rf "$kept"' EXIT
    follow
    say "ended with $code"
    ;;
  stop) stop_workers ;;
  delete) delete_machines ;;
  *)
    echo "usage: bash $out/launch.sh [start|follow|stop|delete]" >&2
    exit 2
    ;;
esac

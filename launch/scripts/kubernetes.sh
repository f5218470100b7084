# Starts the job and follows it to its end; what it printed is kept, one file a pod, and the job is deleted, also a failed one.
#
#   bash launch.sh           all of that; Ctrl-C leaves the job running
#   bash launch.sh follow    shows what the pods print, and cleans up at the end
#   bash launch.sh stop      stops the job: SIGTERM, a snapshot is saved, the same command goes on later

poll=${JAXRL_POLL_SECONDS:-10}
selector="jobset.sigs.k8s.io/jobset-name=$name"
followers=

say() { printf '[launch] %s\n' "$*"; }
k() { kubectl --namespace "$namespace" "$@"; }

pause() {
  sleep "$1" &
  wait $! || true
}

end_followers() {
  local follower
  for follower in $followers; do kill -TERM -- "-$follower" 2>/dev/null || true; done
}

build_image() { # from the files of the repository, without what git ignores
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' path; do if [ -e "$path" ]; then printf '%s\0' "$path"; fi; done |
    tar --null -T - -cf - | docker build --platform linux/amd64 --file launch/Dockerfile --tag "$image" -
  docker push "$image"
}

create_secret() { # values go from the environment to the standard input of kubectl, and nowhere else
  local variable comma=
  {
    printf '{"apiVersion":"v1","kind":"Secret","metadata":{"name":"%s"},"data":{' "$secret"
    for variable in "${secrets[@]}"; do
      printf '%s"%s":"%s"' "$comma" "$variable" "$(printf %s "${!variable}" | base64 | tr -d '\n')"
      comma=,
    done
    printf '}}\n'
  } | k apply --server-side --force-conflicts --filename -
}

terminal_state() { k get jobset "$name" --output 'jsonpath={.status.terminalState}'; }

follow_pod() { # shows and keeps its output
  local log="$out/logs/$1.log" line
  k logs --follow "$1" 2>>"$out/logs/kubectl.txt" | while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    printf '[%s] %s\n' "$1" "$line"
  done || true
}

follow() {
  local ended= pod known=' '
  while :; do
    # Read before the pods, so that none that started before the end is missed.
    ended=$(terminal_state) || ended=UNKNOWN
    # A pod that is started again has another name.
    for pod in $(k get pods --selector "$selector" \
      --output 'jsonpath={range .items[?(@.status.phase!="Pending")]}{.metadata.name}{" "}{end}'); do
      case $known in
        *" $pod "*) ;;
        *)
          known="$known$pod "
          set -m # a process group of its own, so that it can be ended with all its parts
          follow_pod "$pod" &
          set +m
          followers="$followers $!"
          ;;
      esac
    done
    case $ended in
      '') ;;
      UNKNOWN) say 'the cluster does not answer, or the job was deleted' ;;
      *) break ;;
    esac
    if [ "$ended" = UNKNOWN ] && gone; then return 1; fi
    pause "$poll"
  done
  [ -z "$followers" ] || wait $followers || true
  say "$name: $ended"
  [ "$ended" = Completed ]
}

gone() { [ -z "$(k get jobset "$name" --ignore-not-found --output name 2>/dev/null || echo unknown)" ]; }

clean_up() {
  if [ "$keep" = true ]; then
    say "$name is kept; delete it with: bash $out/launch.sh stop"
    return 0
  fi
  delete_job
  if [ "${#secrets[@]}" -gt 0 ]; then k delete secret "$secret" --ignore-not-found; fi
}

detached() {
  trap - INT TERM
  say "the job goes on. Follow it: bash $out/launch.sh follow; stop it: bash $out/launch.sh stop"
  exit 130
}

follow_to_the_end() {
  local code=0
  trap detached INT TERM
  follow || code=1
  clean_up
  exit "$code"
}

start() {
  local before
  before=$(k get jobset "$name" --ignore-not-found --output 'jsonpath={.metadata.name}/{.status.terminalState}')
  case $before in
    '') ;;
    */)
      echo "$name runs already. Follow it: bash $out/launch.sh follow; stop it: bash $out/launch.sh stop" >&2
      exit 1
      ;;
    *) delete_job ;; # an earlier one, which has ended
  esac
  if [ "$build" = true ]; then build_image; fi
  if [ "${#secrets[@]}" -gt 0 ]; then create_secret; fi
  create_job
  follow_to_the_end
}

mkdir -p "$out/logs"
trap end_followers EXIT
case ${1:-start} in
  start) start ;;
  follow) follow_to_the_end ;;
  stop)
    keep=false
    clean_up
    ;;
  *)
    echo "usage: bash $out/launch.sh [start|follow|stop]" >&2
    exit 2
    ;;
esac

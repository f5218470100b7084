# Runs on every host of a slice, in the home folder: setup, start, follow FROM-LINE, stop.

home="$HOME/jaxrl"
cd "$home"

setup() {
  rm -rf code && mkdir -p code
  tar -xzf code.tgz -C code
  if [ -n "$bucket" ]; then mount_bucket; fi
  # The images of TPU VMs have an older Python than the package needs.
  python3 -m pip install --quiet --user uv
  [ -d venv ] || python3 -m uv venv --quiet --python 3.12 venv
  python3 -m uv pip install --quiet --python venv/bin/python -e "code[$extras]"
}

mount_bucket() {
  if mountpoint -q "$mount"; then return 0; fi
  if ! command -v gcsfuse >/dev/null; then
    curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee /usr/share/keyrings/cloud.google.asc >/dev/null
    echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -cs) main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get update -qq && sudo apt-get install -y -qq gcsfuse
  fi
  sudo mkdir -p "$mount" && sudo chown "$(id -u):$(id -g)" "$mount"
  # A snapshot is renamed when it is complete, which for folders of a bucket must be allowed.
  gcsfuse --implicit-dirs --rename-dir-limit 200000 ${prefix:+--only-dir "$prefix"} "$bucket" "$mount"
}

alive() { [ -s pid ] && kill -0 "$(cat pid)" 2>/dev/null; }

run() {
  export PATH="$home/venv/bin:$PATH" "${variables[@]}"
  . ./secrets.sh
  rm -f secrets.sh
  cd code
  "${command[@]}" &
  echo $! >../pid
  local code=0
  wait $! || code=$?
  echo "$code" >../exit
}

start() {
  if alive; then
    echo 'a worker runs here already' >&2
    exit 1
  fi
  rm -f exit pid
  : >log
  # Outlives the connection that starts it.
  setsid nohup bash worker.sh run </dev/null >>log 2>&1 &
  until [ -s pid ] || [ -s exit ]; do sleep 0.2; done
}

follow() { # from this line on; ends with the worker, whose exit code comes last
  tail -n "+$1" -F log 2>/dev/null &
  local tail=$!
  until [ -s exit ]; do
    # A machine that was restarted has no worker and no exit code: like a preemption.
    alive || { sleep 1 && [ -s exit ]; } || echo 75 >exit
    sleep 0.5
  done
  sleep 1
  # Not TERM, which may be ignored here: it was, where the connection was opened.
  { kill -KILL "$tail" && wait "$tail"; } 2>/dev/null || true
  echo "##exit $(cat exit)"
}

stop() {
  local waited=0
  if alive; then kill -TERM "$(cat pid)"; fi
  while alive && [ "$waited" -lt $((grace + 10)) ]; do
    sleep 1
    waited=$((waited + 1))
  done
}

case ${1:-} in
  setup) setup ;;
  run) run ;;
  start) start ;;
  follow) follow "${2:-1}" ;;
  stop) stop ;;
  *)
    echo 'usage: worker.sh setup|start|follow FROM-LINE|stop' >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Measure on a host with a CUDA card: run.sh OUT WHAT... (right, cost, ranks; see rows.py). Prints a table last.
#
# RELEASE=0.22.1     the release of vLLM
# PARCELS=folder     what pack.sh made; without it the host installs from its own package registry, and has the packages of
#                    libraries.txt, or what stands for them there
# PART=tiny         of `right`: only the fleet whose answers are compared (or hybrid: only the one under pressure)
# HOME_DIR=folder    where all of it is unpacked or installed, once (default: a folder of this user's cache)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: run.sh OUT WHAT...}
shift
release=${RELEASE:-0.22.1}
home=${HOME_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/moontide/gpu}
mkdir -p "$home" "$out"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=

if [ -n "${PARCELS:-}" ]; then
  for name in base "vllm-$release"; do
    [ -e "$home/$name/.done" ] && continue
    mkdir -p "$home/$name"
    cat "$PARCELS/$name".[0-9][0-9] | xz -dc -T0 | tar -x -C "$home/$name" &
  done
  wait
  for name in base "vllm-$release"; do touch "$home/$name/.done"; done
  python=python3
  export PYTHONPATH="$home/vllm-$release:$home/base/site"
  # For Mooncake, whose libraries a bare host lacks. CUDA's own come with torch's packages.
  libraries=$home/base/debian/usr/lib/x86_64-linux-gnu:$home/base/debian/lib/x86_64-linux-gnu
  cuda=$(python3 -c "import glob, site; print(':'.join(d for s in site.getsitepackages() for d in glob.glob(s + '/nvidia/*/lib')))")
  export LD_LIBRARY_PATH="$libraries:$cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
else
  python=$home/env-$release/bin/python
  if [ ! -e "$home/env-$release/.done" ]; then
    python3 -m venv --system-site-packages "$home/env-$release"
    # Everything else in requirements.txt comes with vLLM.
    mapfile -t more < <(sed -n "/^mooncake/p; /^# The operator's/,\$p" "$here/requirements.txt" | grep -v '^#')
    "$python" -m pip install -q "vllm==$release" "${more[@]}"
    touch "$home/env-$release/.done"
  fi
fi
cd "$here/../.."
for what in "$@"; do
  "$python" bench/gpu/rows.py "$what" "$out" ${PART:+--part "$PART"} --models "$home/models-$release" --keep "$home/logs-$release-$what-$(date +%s)" || echo "failed: $what"
done
"$python" bench/gpu/table.py "$out"

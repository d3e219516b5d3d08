#!/usr/bin/env bash
# Make what a CUDA host without a network needs to run bench/gpu: pack.sh OUT [RELEASE...]
#
# OUT/base.NN: Python packages and Debian libraries; OUT/vllm-RELEASE.NN: vLLM's CUDA wheel without what a Hopper card does
# not use. Parts of at most PART (55M) each; join those of one name, and it is a tar.xz. Takes minutes and, for a while,
# 3 GB. Needs uv (UV=path), apt-get, dpkg and xz. A host with a network needs none of this: run.sh installs by itself.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: pack.sh OUT [RELEASE...]}
shift
releases=("${@:-0.22.1}")
uv=${UV:-uv}
part=${PART:-55M}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$out/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
wheels=(--python-version 3.12 --python-platform x86_64-manylinux_2_39 --only-binary :all: --no-cache -q)

pack() { # NAME FOLDER: the folder's content as parts, the old ones replaced
  rm -f "$out/$1".[0-9][0-9]
  tar -C "$2" -c . | xz -T2 "${XZ:--5}" | split -b "$part" -d -a 2 - "$out/$1."
  du -ch "$out/$1".[0-9][0-9] | tail -1 | sed "s/total/$1/"
}

if [ -z "${NO_BASE:-}" ]; then
  mkdir -p "$work/base/site" "$work/debs"
  "$uv" pip install --target "$work/base/site" "${wheels[@]}" -r "$here/requirements.txt" --overrides "$here/overrides.txt" \
    --constraints "$here/../../requirements/engine-cpu-0.22.1.txt"
  # Of no use to a text engine.
  rm -rf "$work/base/site"/{pycountry/locales,mooncake/mooncake_client}
  (cd "$work/debs" && grep -v '^#' "$here/libraries.txt" | xargs apt-get download -qq)
  for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/base/debian"; done
  rm -rf "$work/base/debian/usr/share"
  pack base "$work/base"
  rm -rf "$work/base" "$work/debs"
fi
for release in "${releases[@]}"; do
  target=$work/vllm-$release
  "$uv" pip install --target "$target" "${wheels[@]}" --no-deps "vllm==$release"
  # Flash Attention 3 serves a Hopper card; the rest is another front end, headers for run-time compilation, and MLA.
  rm -rf "$target"/vllm/vllm-rs "$target"/vllm/vllm_flash_attn/_vllm_fa2_C* "$target"/vllm/third_party/*/include "$target"/vllm/*flashmla*
  pack "vllm-$release" "$target"
  rm -rf "$target"
done

#!/usr/bin/env bash
# environment.sh NAME PACKAGE...: a trainer in an environment of its own, .conformance/NAME.
#
# torch, transformers and vlmpack are those of the repository's .venv (constraints.txt), which a .pth
# file puts behind the trainer's own packages. Packages are installed without their dependencies:
# name those that are missing. What a trainer pins and does not get is a line of docs/conformance.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1; shift
home=.conformance/$name
if [ ! -e "$home" ]; then
    "$(.venv/bin/python -c 'import sys; print(sys._base_executable)')" -m venv "$home"
    site=$("$home/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$site/repository.pth"
    pwd >> "$site/repository.pth"
fi
"$home/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$@"

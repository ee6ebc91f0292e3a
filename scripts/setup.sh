#!/usr/bin/env bash
# Sets up a virtual environment in .venv with the package, LIBERO and the development tools, and the system's OpenGL
# libraries. Run by make; may be run again at any time.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

say() { printf '\033[1m%s\033[0m\n' "$*"; }
fail() { printf '\033[1;31m%s\033[0m\n' "$*" >&2; exit 1; }

"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    fail "Python 3.10 to 3.13 is needed, $PYTHON is $("$PYTHON" --version 2>&1 || echo missing). Name another: make PYTHON=python3.12 ..."

# ---- system packages: software and EGL rendering for MuJoCo, and venv on Debian --------------------------------------
packages=()
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || packages+=("python3-venv")
have_library() { ldconfig -p | grep -q "$1"; }
have_library libOSMesa.so || packages+=(libosmesa6)
have_library libEGL.so.1 || packages+=(libegl1 libegl-mesa0)
have_library libGL.so.1 || packages+=(libgl1 libgl1-mesa-dri)
have_library libGLESv2.so.2 || packages+=(libgles2)
have_library libOpenGL.so.0 || packages+=(libopengl0)
have_library libglib-2.0.so.0 || packages+=(libglib2.0-0)
if [ ${#packages[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || fail "Missing system libraries (Debian names): ${packages[*]}. Install them with your package manager."
    if [ "$(id -u)" -eq 0 ]; then
        say "Installing system packages: ${packages[*]}"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
    else
        fail "Missing system packages. Run: sudo apt-get update && sudo apt-get install -y ${packages[*]}"
    fi
fi

# ---- Python packages ----------------------------------------------------------------------------------------------
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# Byte code is written when a module is first imported: compiling 3 GB of packages that are mostly not takes minutes.
export PIP_NO_COMPILE=1
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    if nvidia-smi >/dev/null 2>&1; then
        say "Installing torch for the GPU"
        pip install -q 'torch>=2.13,<2.15'
    else
        say "No GPU: installing the CPU build of torch"
        pip install -q 'torch==2.13.0+cpu' 2>/dev/null || {
            say "pip finds no CPU build (give it one with PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS); the default build works too"
            pip install -q 'torch>=2.13,<2.15'
        }
    fi
fi
say "Installing wamrl_torchrl with LIBERO and the Wan parts"
pip install -q -e '.[libero,wan,lerobot,dev]'

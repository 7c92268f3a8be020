#!/usr/bin/env bash
# Runs the suite as an unlike machine would see it, and leaves nothing running: `bash scripts/ci/hostile.sh tests/strategies/launch -k cli`.
# Arguments go to pytest, whose summary is the last line and whose exit status this is.
# HOSTILE_WITHOUT names what to leave out, to find the culprit: "user network port precision core load home path locale".
# HOSTILE_CORES=8 (1, 2, any number) says how many cores the machine reports: os.cpu_count, affinity, psutil, /proc/cpuinfo
# and the control group's quota; they need not be there. Without it they are those that are there.
# As root the suite runs as the user `nobody` in a copy of the tree; HOSTILE_USER names another user.
source "$(dirname "$0")/../setup.sh"
root=$PWD

simulated=() left_out=()
simulates() { # NAME WHY_NOT TEXT: whether to, and the list of what is
    if [[ " ${HOSTILE_WITHOUT:-} " == *" $1 "* ]]; then left_out+=("$3: not asked for"); return 1; fi
    if [ -n "$2" ]; then left_out+=("$3: $2"); return 1; fi
    simulated+=("$3")
}
lacking() { command -v "$1" > /dev/null || echo "$1 is not installed"; }

work=$(mktemp -d "${TMPDIR:-/tmp}/dsplan-hostile.XXXXXX")
mark=HOSTILE_RUN=$work
left() { grep -xzlsF "$mark" /proc/[0-9]*/environ | tr -dc '0-9\n' || true; } # what was started here and still runs
finish() {
    trap '' INT TERM HUP
    for _ in 1 2 3 4 5; do # what is just being started is there the next time
        for process in $(left); do kill -KILL "$process" 2> /dev/null || true; done
        sleep 0.1
    done
    chmod -R u+w "$work" 2> /dev/null || true
    rm -rf --one-file-system "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

place=$work/tree
if simulates path "" "paths with a space: the tree and TMPDIR"; then place="$work/a tree"; fi
mkdir "$place" "$place.tmp" "$place.home"
tar --exclude=./.git --exclude=./.venv --exclude=__pycache__ --exclude='./.*_cache' -C "$root" -cf - . | tar -C "$place" -xf -

inside=() # what pytest is started through, outermost first
variables=("$mark" TMPDIR="$place.tmp" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 -u TORCH_EXTENSIONS_DIR)

why=; [ "$(id -u)" -eq 0 ] && unshare -n true 2> /dev/null || why="this user may not make network namespaces"
if simulates network "$why" "no network but loopback"; then
    # SIOCSIFFLAGS with IFF_UP and IFF_RUNNING
    up="import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x41))"
    inside+=(unshare -n bash -c '"$0" -c "$1" && shift && exec "$@"' "$root/.venv/bin/python" "$up")
fi

if simulates port "" "port 29500 taken by another process"; then
    taken='import socket, subprocess, sys
held = []
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    try:
        holder = socket.socket(family)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((address, 29500))
        holder.listen()
        held.append(holder)
    except OSError:
        pass  # no IPv6, or it is taken already
sys.exit(subprocess.call(sys.argv[1:]))'
    inside+=("$root/.venv/bin/python" -c "$taken")
fi

user=${HOSTILE_USER:-nobody} as_user=() closed=() why=
if [ "$(id -u)" -ne 0 ]; then why="this is $(id -un) already"
elif ! id "$user" > /dev/null 2>&1; then why="there is no user $user"
else
    why=$(lacking setpriv)
    as_user=(setpriv "--reuid=$user" "--regid=$(id -g "$user")" --clear-groups)
    for path in "$root" "$(python -c 'import sys; print(sys.base_prefix)')"; do # each that the user may not reach
        top=
        for part in $(seq "$(tr -dc / <<< "$path" | wc -c)"); do
            top=$(cut -d/ -f-$((part + 1)) <<< "$path")
            if ! "${as_user[@]}" test -x "$top"; then closed+=("$top" "$path"); break; fi
        done
    done
    if [ "${#closed[@]}" -gt 0 ] && ! unshare -m true 2> /dev/null; then why="$user may not enter ${closed[0]}"; fi
fi
if simulates user "$why" "another user than root: $user"; then
    chmod 755 "$work"
    chown -R "$user" "$place" "$place.tmp"
    variables+=(USER="$user" LOGNAME="$user")
    if [ "${#closed[@]}" -gt 0 ]; then
        # In a mount namespace of the suite's own, an empty directory takes the place of the one that is closed to the
        # user, with nothing in it but the tree or the interpreter.
        opened='spare=$1; shift; closed=()
            while [ "$1" != -- ]; do
                mkdir -p "$spare$2"; mount --bind "$2" "$spare$2"; closed+=("$1" "$2"); shift 2
            done
            for ((at = 0; at < ${#closed[@]}; at += 2)); do
                [ -d "${closed[at + 1]}" ] && [ -n "${seen-}" ] && [ "$seen" = "${closed[at]}" ] ||
                    mount -t tmpfs -o mode=755 none "${closed[at]}"
                seen=${closed[at]}; mkdir -p "${closed[at + 1]}"; mount --bind "$spare${closed[at + 1]}" "${closed[at + 1]}"
            done
            shift; exec "$@"'
        inside+=(unshare -m bash -c "$opened" opened "$place.closed" "${closed[@]}" --)
    fi
    inside+=("${as_user[@]}")
fi
# An environment of the copy's own, as pip makes one at a path with a space, over the packages of the real one.
packages=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$place/.venv${packages#"$root/.venv"}
mkdir -p "$place/.venv/bin" "$own"
cp "$root/.venv/pyvenv.cfg" "$place/.venv"
printf '%s\n' "$place" "$packages" > "$own/hostile.pth"
for command in "$root"/.venv/bin/*; do
    copied=$place/.venv/bin/${command##*/}
    if head -1 "$command" | grep -aq '^#!.*python'; then
        printf '%s\n' '#!/bin/sh' "'''exec' \"$place/.venv/bin/python\" \"\$0\" \"\$@\"" "' '''" > "$copied"
        tail -n +2 "$command" >> "$copied"
        chmod 755 "$copied"
    else
        cp -P "$command" "$copied"
    fi
done

why=; [ "$(id -u)" -ne 0 ] || [[ " ${inside[*]-} " == *" setpriv "* ]] || why="root may write everywhere"
if simulates home "$why" "HOME that cannot be written"; then
    chmod 555 "$place.home"
    variables+=(HOME="$place.home")
fi

if simulates precision "" "a processor without fp16 and bf16, of AVX2 at most"; then
    variables+=(HOSTILE_OLD_PROCESSOR=1 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2)
fi

if simulates reported "$([ -n "${HOSTILE_CORES:-}" ] || echo "HOSTILE_CORES does not say how many")" "${HOSTILE_CORES:-other} cores reported"; then
    variables+=(HOSTILE_CORES="$HOSTILE_CORES")
else
    variables+=(-u HOSTILE_CORES)
fi
cp "$root/scripts/ci/other_machine.py" "$own"
echo "import other_machine" >> "$own/hostile.pth"

if simulates locale "" "LANG=C"; then
    variables+=(-u LC_ALL -u LC_CTYPE LANG=C)
fi

if simulates core "$(lacking taskset)" "one core"; then
    inside+=(taskset -c "$(taskset -cp $$ | sed 's/.*[ ,-]//')")
fi

if simulates load "" "load on every core"; then
    for _ in $(seq "$(nproc)"); do env "$mark" nice -n 10 bash -c 'while :; do :; done' & disown; done
fi

simulated+=("no terminal")
printf 'hostile: simulated: %s\n' "${simulated[@]}"
[ "${#left_out[@]}" -eq 0 ] || printf 'hostile: not simulated: %s\n' "${left_out[@]}"

# env takes its options first
options=() settings=()
for ((at = 0; at < ${#variables[@]}; at++)); do
    if [ "${variables[at]}" = -u ]; then options+=(-u "${variables[++at]}"); else settings+=("${variables[at]}"); fi
done
cd "$place"
env "${options[@]}" "${settings[@]}" PATH="$place/.venv/bin:$PATH" \
    setsid --wait "${inside[@]}" python -m pytest -n 2 --dist loadfile -p no:cacheprovider -o timeout=1200 "$@" < /dev/null &
wait $! && status=0 || status=$?
exit "$status"

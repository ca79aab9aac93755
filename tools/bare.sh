#!/usr/bin/env bash
# Run one target of the Makefile on a bare machine: a Debian 12 with nothing but Python 3.11, its venv, make and certificates.
#
#     tools/bare.sh TARGET USER        # called by `make bare PART=demo AS=nobody`
#
# Needs root and debootstrap. The system is made once, in $BARE; each call copies the last commit into a new folder there and runs
# in it, with a new home and an environment of its own. $BARE_SHARE names files and folders of this machine that pip needs, such as
# its configuration and local indexes; they are mounted read-only.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$1 user=$2
bare=${BARE:-/var/tmp/antiphon-bare}
mirror=${BARE_MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m 1 '/debian$')}

for command in debootstrap unshare chroot; do
    command -v $command > /dev/null || { echo "make bare needs $command: apt-get install debootstrap util-linux"; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "make bare needs root, for chroot and mounts"; exit 2; }

if [ ! -e "$bare/made" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,make,ca-certificates bookworm "$bare" "$mirror"
    chroot "$bare" useradd --create-home ordinary
    touch "$bare/made"
fi

case $user in root) name=root ;; *) name=ordinary ;; esac
place=/home/$name-antiphon
home=$(chroot "$bare" sh -c "echo ~$name")
rm -rf "${bare:?}$place" "${bare:?}$home"
mkdir -p "$bare$place"
chroot "$bare" install --directory --owner="$name" "$home"
git archive HEAD | tar --extract --directory "$bare$place"
chroot "$bare" chown --recursive "$name:" "$place"

export bare place home name target
unshare --mount --pid --fork bash -euc '
    mount --bind "$bare" "$bare"  # a root that is a mount, as on every machine: namespaces need one
    mount -t proc proc "$bare/proc"
    mount --rbind /dev "$bare/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$bare/dev/shm"
    mount -t tmpfs tmpfs "$bare/tmp"
    for shared in /etc/resolv.conf /etc/hosts ${BARE_SHARE:-}; do
        [ -e "$shared" ] || continue
        if [ -d "$shared" ]; then mkdir -p "$bare$shared"; else mkdir -p "$bare${shared%/*}"; touch "$bare$shared"; fi
        mount --bind --options ro "$shared" "$bare$shared"
    done
    exec chroot --userspec="$name:" "$bare" env --ignore-environment HOME="$home" LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin \
        sh -c "cd $place && id -un && python3 --version && make $target"
'

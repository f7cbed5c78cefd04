#!/usr/bin/env bash
# Runs what needs another kernel set-up than this machine's: Debian 12's own Linux 6.1 with cgroup v2
# only, in QEMU by software emulation. The machine has an ext4 disk of its own as root, since Linux 6.1 can't idmap
# overlays or tmpfs, sees this one's /usr and the repository in it read-only, and runs
# test/qemu-guest.sh: test/qemu.sh [contexts|gvisor], which leaves out all but code contexts, or all but isolation gvisor.
set -euo pipefail
part=${1:-}
cd "$(dirname "$0")/.."
source test/qemu-kernel.sh

echo "building"
make build runsc >/dev/null
rm -rf "$cache/tests"
for p in linux/cgroup linux/landlock linux/probe linux/mount; do
	CGO_ENABLED=0 go test -c -o "$cache/tests/${p//\//-}.test" "./internal/$p"
	echo "internal/$p" >"$cache/tests/${p//\//-}.dir"
done

# An initial file system that finds this machine's root by 9p and changes into it.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
truncate -s 8G "$work/disk"
mkfs.ext4 -q "$work/disk"
modules "$work/init" virtio_pci virtio_blk ext4 9pnet_virtio 9p overlay loop btrfs
cat >"$work/init/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read m; do insmod \$m; done </modules
mount -t ext4 /dev/vda /root
cd /root
mkdir host usr proc sys dev tmp run var root home mnt .$repo -p
for l in bin sbin lib lib64; do ln -s usr/\$l \$l; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=262144 host host
cp -a host/etc etc
mount --bind host/usr usr
mount --bind host$repo .$repo
chmod 1777 tmp
mkdir -p var/lib var/tmp
for d in proc sys dev; do mount --move /\$d /root/\$d; done
mount -t tmpfs run run
mount -t cgroup2 cgroup2 sys/fs/cgroup
ip link set lo up
mkdir -p dev/pts dev/shm
mount -t devpts pts dev/pts
# Not chroot: user namespaces can't be made in one (user_namespaces(7)).
exec switch_root /root /bin/bash -c '$repo/test/qemu-guest.sh $repo $cache/tests $part; echo "qemu exit \$?"; busybox poweroff -f'
INIT
initrd "$work/init" "$work/initrd"

echo "booting Linux $release, emulated: this takes some minutes"
boot "$work/initrd" "$work/disk" "cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1" \
	-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap | tee "$work/log"
grep -q '^qemu exit 0' "$work/log"

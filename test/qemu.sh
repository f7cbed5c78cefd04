#!/usr/bin/env bash
# Runs what needs another kernel set-up than this machine's: Debian 12's own Linux 6.1 with cgroup v2
# only, in QEMU by software emulation. The machine has an ext4 disk of its own as root, since Linux 6.1 can't idmap
# overlays or tmpfs, sees this one's /usr and the repository in it read-only, and runs
# test/qemu-guest.sh.
#
# The kernel and QEMU come from Debian's packages; what was fetched stays in .cache/qemu.
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
cache=$repo/.cache/qemu
mkdir -p "$cache"

need=()
for pair in qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod mkfs.ext4:e2fsprogs; do
	command -v "${pair%%:*}" >/dev/null || need+=("${pair##*:}")
done
if ((${#need[@]})); then
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${need[@]}" >/dev/null
fi

# The kernel's package, unpacked and not installed.
package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" && $2 ~ /^linux-image-/ {print $2; exit}')
release=${package#linux-image-}
if [[ ! -e $cache/$release/boot/vmlinuz-$release ]]; then
	echo "fetching Linux $release"
	(cd "$cache" && apt-get -o APT::Sandbox::User=root download -qq "$package")
	rm -rf "${cache:?}/$release"
	dpkg-deb -x "$cache/${package}"_*.deb "$cache/$release"
	rm -f "$cache/${package}"_*.deb
	depmod -b "$cache/$release" "$release"
fi

echo "building"
make build >/dev/null
for p in linux/cgroup linux/landlock linux/probe linux/mount; do
	CGO_ENABLED=0 go test -c -o "$cache/tests/${p//\//-}.test" "./internal/$p"
	echo "internal/$p" >"$cache/tests/${p//\//-}.dir"
done

# An initial file system that finds this machine's root by 9p and changes into it.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{bin,lib/modules,proc,sys,dev,root}
cp "$(command -v busybox)" "$work/bin/busybox"
modules() { # NAME…: copies modules with all that they depend on
	local dir=lib/modules/$release file
	for m in "$@"; do
		modprobe -d "$cache/$release" -S "$release" --show-depends "$m" 2>/dev/null | awk '$1 == "insmod" {print $2}'
	done | while read -r file; do
		file=${file#"$cache/$release/"}
		[[ -e $work/$file ]] && continue
		install -D "$cache/$release/$file" "$work/$file"
		echo "/$file" >>"$work/modules"
	done
}
modules virtio_pci virtio_blk ext4 9pnet_virtio 9p overlay loop btrfs
truncate -s 8G "$work/disk"
mkfs.ext4 -q "$work/disk"
cat >"$work/init" <<INIT
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
exec switch_root /root /bin/bash -c '$repo/test/qemu-guest.sh $repo $cache/tests; echo "qemu exit \$?"; busybox poweroff -f'
INIT
chmod +x "$work/init"
(cd "$work" && find . ! -name disk | cpio --quiet -o -H newc | gzip -1) >"$cache/initrd"

log=$cache/log
echo "booting Linux $release, emulated: this takes some minutes"
# What a hung kernel would cost is bounded.
timeout --foreground "${QEMU_TIMEOUT:-40m}" qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m 5G \
	-nographic -no-reboot -nodefaults -serial stdio \
	-kernel "$cache/$release/boot/vmlinuz-$release" -initrd "$cache/initrd" \
	-append "console=ttyS0 quiet panic=-1 cgroup_no_v1=all systemd.unified_cgroup_hierarchy=1" \
	-drive "file=$work/disk,if=virtio,format=raw,cache=unsafe" \
	-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap </dev/null | tee "$log"
grep -q '^qemu exit 0' "$log"

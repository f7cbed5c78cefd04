#!/usr/bin/env bash
# Installs the Debian package on a fresh Debian 12 that runs systemd, in QEMU by software emulation,
# and lives with it: test/systemd-guest.sh is what an administrator does there.
set -euo pipefail
cd "$(dirname "$0")/.."
source test/qemu-kernel.sh
install_missing debootstrap:debootstrap

echo "building the package"
make dist NATIVE=1 >/dev/null

# The fresh machine: nothing but what Debian calls minimal, systemd, and the packages that ours recommends.
debian=$cache/debian.tar
if [[ ! -e $debian ]]; then
	mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m1 '/debian/\?$' || true)
	echo "fetching Debian 12"
	tree=$(mktemp -d)
	debootstrap --variant=minbase --include=systemd-sysv,dbus,udev,kmod,iproute2,procps,btrfs-progs,python3-minimal,ca-certificates bookworm "$tree" ${mirror:+"$mirror"} >/dev/null
	rm -rf "$tree"/var/cache/apt/archives/*.deb
	tar -C "$tree" -cf "$debian.part" . && mv "$debian.part" "$debian"
	rm -rf "$tree"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/root"
tar -C "$work/root" -xf "$debian"
mkdir -p "$work/root/lib/modules" "$work/root/opt"
cp -r "$cache/$release/lib/modules/$release" "$work/root/lib/modules/"
cp dist/casemate_*_amd64.deb "$work/root/opt/casemate.deb"
install -m 0755 test/systemd-guest.sh "$work/root/opt/test.sh"
echo debian >"$work/root/etc/hostname"
cat >"$work/root/etc/systemd/system/casemate-test.service" <<'UNIT'
[Unit]
Description=The test
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/opt/test.sh
ExecStopPost=/bin/sh -c 'echo "systemd exit $EXIT_STATUS"; systemctl poweroff --force --force'
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=default.target
UNIT
install -d "$work/root/etc/systemd/system/multi-user.target.wants"
ln -sf ../casemate-test.service "$work/root/etc/systemd/system/multi-user.target.wants/casemate-test.service"
ln -sf /dev/null "$work/root/etc/systemd/system/serial-getty@ttyS0.service"
truncate -s 6G "$work/disk"
mkfs.ext4 -q -d "$work/root" "$work/disk"
rm -rf "$work/root"

modules "$work/init" virtio_pci virtio_blk ext4
cat >"$work/init/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
while read m; do insmod $m; done </modules
mount -t ext4 /dev/vda /root
umount /proc
mount --move /dev /root/dev
exec switch_root /root /sbin/init
INIT
initrd "$work/init" "$work/initrd"

echo "booting Debian with Linux $release, emulated: this takes some minutes"
# Services may take long to start on a busy machine that emulates another (systemd(1)).
boot "$work/initrd" "$work/disk" "systemd.show_status=0 systemd.default_timeout_start_sec=1800" | tee "$work/log"
grep -q '^systemd exit 0' "$work/log"

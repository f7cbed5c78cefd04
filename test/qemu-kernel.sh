# For the scripts that start a machine in QEMU, to be sourced in the repository's root: Debian's kernel
# in $cache/$release, and what an initial file system needs of it. The kernel and QEMU come from
# Debian's packages; what was fetched stays in .cache/qemu.
repo=$PWD
cache=$repo/.cache/qemu
mkdir -p "$cache"

install_missing() { # PROGRAM:PACKAGE…
	local pair need=()
	for pair in "$@"; do
		command -v "${pair%%:*}" >/dev/null || need+=("${pair##*:}")
	done
	((${#need[@]})) || return 0
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${need[@]}" >/dev/null
}
install_missing qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio depmod:kmod mkfs.ext4:e2fsprogs

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

modules() { # DIR NAME…: copies modules with all that they depend on into DIR, and lists them in DIR/modules
	local work=$1 dir=lib/modules/$release file m
	shift
	for m in "$@"; do
		modprobe -d "$cache/$release" -S "$release" --show-depends "$m" 2>/dev/null | awk '$1 == "insmod" {print $2}'
	done | while read -r file; do
		file=${file#"$cache/$release/"}
		[[ -e $work/$file ]] && continue
		install -D "$cache/$release/$file" "$work/$file"
		echo "/$file" >>"$work/modules"
	done
}

initrd() { # DIR FILE: packs the initial file system in DIR, whose init the caller wrote
	mkdir -p "$1"/{bin,proc,sys,dev,root}
	cp "$(command -v busybox)" "$1/bin/busybox"
	chmod +x "$1/init"
	(cd "$1" && find . -print0 | cpio --quiet -0 -o -H newc | gzip -1) >"$2"
}

# no_timer_check: the kernel waits ten ticks for its timer and panics without them, which a busy machine, emulating one,
# may not give it in time (arch/x86/kernel/apic/io_apic.c, check_timer).
boot() { # INITRD DISK APPEND QEMU-OPTION…: until the machine turns itself off; what a hang costs is bounded
	local initrd=$1 disk=$2 append=$3
	shift 3
	timeout --foreground "${QEMU_TIMEOUT:-60m}" qemu-system-x86_64 -machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m 5G \
		-nographic -no-reboot -nodefaults -serial stdio \
		-kernel "$cache/$release/boot/vmlinuz-$release" -initrd "$initrd" -append "console=ttyS0 quiet panic=-1 no_timer_check $append" \
		-drive "file=$disk,if=virtio,format=raw,cache=unsafe" "$@" </dev/null
}

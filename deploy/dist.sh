#!/usr/bin/env bash
# Builds what a release consists of into dist/: a static tarball per architecture, a Debian package
# each where dpkg-deb is there, and checksums. The same commit gives the same bytes. With "native" it does so for
# the machine's own architecture only.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${VERSION:-dev}
# A Debian version begins with a digit and has no "-" of its own.
debversion=$(sed -E 's/^v//; s/-(alpha|beta|rc)/~\1/; s/-/+/g; /^[0-9].*[.]/!s/^/0~git/' <<<"$version")
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export CGO_ENABLED=0 GOOS=linux
guests=internal/guestbin/bin
native=$(go env GOHOSTARCH)

rm -rf dist
mkdir -p dist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() { # ARCH OUTPUT
	rm -f $guests/guest-linux-* # what lies there is embedded
	GOARCH=$1 go build -trimpath -ldflags '-s -w' -o "$guests/guest-linux-$1" ./cmd/casemate-guest
	GOARCH=$1 go build -trimpath -ldflags "-s -w -X main.version=$version" -o "$2" ./cmd/casemate
}

tarball() { # ARCH PROGRAM
	local name=casemate-$version-linux-$1
	local root=$work/$name
	mkdir -p "$root/deploy" "$root/completions" "$root/docs"
	install -m 0755 "$2" "$root/casemate"
	install -m 0755 install.sh "$root/install.sh"
	install -m 0755 deploy/install-files.sh "$root/deploy/"
	install -m 0644 deploy/casemate.service "$root/deploy/"
	install -m 0644 "$work"/completions/* "$root/completions/"
	install -m 0644 README.md LICENSE "$root/"
	cp -r docs/. "$root/docs/"
	chmod -R u=rwX,go=rX "$root"
	tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work" -cf - "$name" |
		gzip -9n >"dist/$name.tar.gz"
}

package() { # ARCH PROGRAM
	local root=$work/deb-$1
	mkdir -p "$root/DEBIAN"
	deploy/install-files.sh "$2" "$root" /usr "$work/completions"
	install -D -m 0644 LICENSE "$root/usr/share/doc/casemate/copyright"
	install -D -m 0644 README.md "$root/usr/share/doc/casemate/README.md"
	cat >"$root/DEBIAN/control" <<-CONTROL
		Package: casemate
		Version: $debversion
		Architecture: $1
		Maintainer: The Casemate authors <root@localhost>
		Installed-Size: $(find "$root/usr" -printf '%y %s\n' | awk '{ n += $1 == "f" ? int(($2 + 1023) / 1024) : 1 } END { print n }')
		Recommends: btrfs-progs
		Suggests: debootstrap
		Section: admin
		Priority: optional
		Homepage: https://casemate.dev
		Description: Run AI agents' code in sandboxes on your own machine
		 Casemate keeps code that nobody read apart by Linux namespaces, uid ranges, seccomp,
		 Landlock and control groups, records what it did, and serves it over an HTTP API.
	CONTROL
	cat >"$root/DEBIAN/postinst" <<-'POSTINST'
		#!/bin/sh
		set -e
		if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
			systemctl daemon-reload
			systemctl try-restart casemate.service || true
		fi
	POSTINST
	cat >"$root/DEBIAN/prerm" <<-'PRERM'
		#!/bin/sh
		set -e
		if [ "$1" = remove ]; then
			# Without the program nobody could end them.
			casemate down --sandboxes || true
			if [ -d /run/systemd/system ]; then
				systemctl disable --now casemate.service || true
			fi
		fi
	PRERM
	chmod 0755 "$root/DEBIAN/postinst" "$root/DEBIAN/prerm"
	find "$root" -newermt "@$SOURCE_DATE_EPOCH" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
	dpkg-deb --root-owner-group -Zxz --build "$root" "dist/casemate_${debversion}_$1.deb" >/dev/null
}

mkdir -p "$work/completions"
archs=(arm64 amd64)
[[ $native == arm64 ]] && archs=(amd64 arm64)
[[ ${1:-} == native ]] && archs=("$native")
for arch in "${archs[@]}"; do # the machine's own last, so that its guest stays for the next build
	build "$arch" "$work/casemate-$arch"
done
for shell in bash zsh fish; do
	"$work/casemate-$native" completion "$shell" >"$work/completions/casemate.$shell"
done
for arch in "${archs[@]}"; do
	tarball "$arch" "$work/casemate-$arch"
	if command -v dpkg-deb >/dev/null; then package "$arch" "$work/casemate-$arch"; fi
done
(cd dist && sha256sum -- * >SHA256SUMS)
ls -l dist

# Ends and removes what tests that were killed have left. It reads the tag that all of it carries, and then waits until
# nobody holds the other end any more: then the test program is gone, however it went.
read -r tag
case $tag in t??????) ;; *) exit 1 ;; esac
# By the shell itself: a process more, begun after a test looked what there is, would be one that the test left behind.
while read -r _; do :; done

# Servers that still run end their sandboxes themselves.
for state in /tmp/cm-"$tag"-*/server.json /tmp/cm-"$tag"-*/*/server.json; do
	pid=$(sed -n 's/^ *"pid": \([0-9]*\).*/\1/p' "$state" 2>/dev/null)
	if grep -qs "$tag" "/proc/$pid/cmdline"; then
		timeout 60 "/proc/$pid/exe" down --sandboxes --run-dir "${state%/*}"
	fi
done
for p in /proc/[0-9]*; do
	if grep -qs "$tag" "$p/environ" "$p/cmdline"; then kill -9 "${p#/proc/}"; fi
done

# Control groups carry the tag, or the id of a server that has the socket of one of its guests in a directory with the tag.
groups=$tag
for socket in $(find /tmp/cm-"$tag"-* -xdev -name 'g*.sock'); do
	name=${socket##*/}
	home=$(find /sys/fs/cgroup -type d -path "*/casemate-*/${name%.sock}" -printf '%h\n' -quit)
	case ${home##*/} in casemate-?*) groups="$groups ${home##*/}" ;; esac
done
for part in $groups; do
	find /sys/fs/cgroup -depth -type d -path "*$part*" | while read -r group; do
		for _ in 1 2 3 4 5 6 7 8 9 10; do
			if [ -e "$group/freezer.state" ]; then echo THAWED >"$group/freezer.state"; fi
			xargs -r kill -9 <"$group/cgroup.procs"
			rmdir "$group" && break
			sleep 0.2
		done
	done
done

while read -r _ _ _ _ at _; do
	case $at in /tmp/cm-"$tag"-*) umount -l "$at" ;; esac
done </proc/self/mountinfo
for loop in /sys/block/loop*/loop; do
	if grep -qs "$tag" "$loop/backing_file"; then
		device=${loop%/loop}
		losetup -d "/dev/${device##*/}"
	fi
done
rm -rf --one-file-system /tmp/cm-"$tag"-*

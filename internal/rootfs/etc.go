package rootfs

// The default user of both templates.
const (
	defaultUser = "user"
	defaultUID  = 1000
)

// profile is what a login shell reads. Clients start "bash -l -c …" for every command, so it starts no
// process: Debian's own costs an id, a run-parts or a locale check each time.
const profile = `# Read by every login shell: nothing here may start a process.
if [ "${EUID:-1000}" = 0 ]; then
  PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
else
  PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
fi
export PATH
if [ "${PS1-}" ]; then
  PS1='\u@\h:\w\$ '
fi
`

// hostFiles are the files of a made-up /etc.
func hostFiles() map[string]string {
	return map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/bash\n" +
			"daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n" +
			"user:x:1000:1000::/home/user:/bin/bash\n" +
			"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
		"etc/group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nusers:x:100:\nuser:x:1000:\nnogroup:x:65534:\n",
		"etc/hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
		"etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n" +
			"networks: files\nprotocols: files\nservices: files\nrpc: files\n",
		"etc/host.conf":   "multi on\n",
		"etc/resolv.conf": "",
		"etc/hostname":    "sandbox\n",
		"etc/timezone":    "Etc/UTC\n",
		"etc/profile":     profile,
		"etc/bash.bashrc": "[ -z \"${PS1-}\" ] || PS1='\\u@\\h:\\w\\$ '\n",
		"etc/shells":      "/bin/sh\n/bin/bash\n",
		"etc/machine-id":  "",
		"etc/fstab":       "",
		"etc/gai.conf":    "",
		"etc/inputrc":     "set enable-keypad on\n",
		"etc/login.defs":  "UID_MIN 1000\nGID_MIN 1000\n",
		"etc/environment": "",
	}
}

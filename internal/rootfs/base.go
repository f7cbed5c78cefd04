package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// baseVersion changes when what is built here changes.
const baseVersion = 1

// baseSuite is the Debian release.
const baseSuite = "bookworm"

// basePackages come on top of debootstrap's minbase.
const basePackages = "bash,ca-certificates,curl,file,git,jq,less,libnss-myhostname,patch,procps," +
	"python-is-python3,python3,python3-pip,python3-venv,sudo,unzip,wget,xz-utils,zip"

// makeBase builds template base.
func (s *Store) makeBase(ctx context.Context, root string, progress Progress) (source string, err error) {
	sources := readAptSources("/etc/apt")
	if err := bootstrap(ctx, root, sources, progress); err != nil {
		return "", err
	}
	progress("configure", 0.98, "")
	if err := configureBase(root, sources); err != nil {
		return "", fmt.Errorf("configure base: %w", err)
	}
	return "Debian " + baseSuite, nil
}

// configureBase turns what debootstrap left into a sandbox's root.
func configureBase(root string, sources aptSources) error {
	in := func(name string) string { return filepath.Join(root, name) }
	// Nothing of the build, and nothing of the host: its resolv.conf and hostname were copied in.
	for _, pattern := range []string{
		"dev/*", "var/cache/apt/*.bin", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/log/*", "tmp/*",
		"var/cache/debconf/*-old", "var/lib/dpkg/*-old", "etc/*-", "debootstrap",
		"usr/lib/python3*/EXTERNALLY-MANAGED", // there is no other user of this system's Python than the sandbox's
	} {
		paths, err := filepath.Glob(in(pattern))
		if err != nil {
			return err
		}
		for _, p := range paths {
			if err := os.RemoveAll(p); err != nil {
				return err
			}
		}
	}
	if err := writeFiles(root, map[string]string{
		"etc/hosts": hostFiles()["etc/hosts"], "etc/resolv.conf": "", "etc/hostname": "sandbox\n", "etc/machine-id": "",
		"etc/timezone": "Etc/UTC\n", "etc/profile": profile, "root/.profile": "",
		"etc/dpkg/dpkg.cfg.d/sandbox":  "# A sandbox that dies half way through is thrown away.\nforce-unsafe-io\n",
		"etc/apt/apt.conf.d/50sandbox": "APT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n",
		"etc/apt/sources.list":         sources.text(),
		"etc/sudoers.d/" + defaultUser: defaultUser + " ALL=(ALL:ALL) NOPASSWD: ALL\n",
	}); err != nil {
		return err
	}
	if err := os.Chmod(in("etc/sudoers.d/"+defaultUser), 0o440); err != nil {
		return err
	}
	if err := addUser(root); err != nil {
		return err
	}
	return stripImported(root)
}

// addUser adds the default user, with a home made from /etc/skel.
func addUser(root string) error {
	for name, line := range map[string]string{
		"etc/passwd":  defaultUser + ":x:1000:1000::/home/" + defaultUser + ":/bin/bash\n",
		"etc/group":   defaultUser + ":x:1000:\n",
		"etc/shadow":  defaultUser + ":!:20000:0:99999:7:::\n",
		"etc/gshadow": defaultUser + ":!::\n",
	} {
		f, err := os.OpenFile(filepath.Join(root, name), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(line)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	home := filepath.Join(root, "home", defaultUser)
	if err := copyPublic(filepath.Join(root, "etc/skel"), home); err != nil {
		return err
	}
	return filepath.WalkDir(home, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, defaultUID, defaultUID)
	})
}

// treeSize sums the sizes of regular files in a tree of our own making.
func treeSize(root string) (int64, error) {
	var size int64
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if st, err := d.Info(); err != nil {
			return err
		} else if st.Mode().IsRegular() {
			size += st.Size()
		}
		return nil
	})
	return size, err
}

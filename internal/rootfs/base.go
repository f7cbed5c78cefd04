package rootfs

// baseTemplate is a built Debian root file system.
type baseTemplate struct {
	root string
	meta meta
}

func (t *baseTemplate) plan() Plan {
	return Plan{
		Lowers: []string{t.root},
		Env: map[string]string{
			"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
		},
		User: defaultUser, Dir: "/home/" + defaultUser,
	}
}

func (s *Store) openBase() (*baseTemplate, error) { return nil, nil }

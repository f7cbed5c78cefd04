package rootfs

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"casemate.dev/internal/errs"
)

// bootstrap runs debootstrap into root, in mount and pid namespaces of its own: what it mounts and
// starts is gone with it, however it ends.
func bootstrap(ctx context.Context, root string, sources aptSources, progress Progress) error {
	program, err := findProgram("debootstrap")
	if err != nil {
		return errs.Wrap(err, errs.Unsupported, "debootstrap is not installed").WithHint("apt-get install debootstrap")
	}
	args := []string{"--variant=minbase", "--merged-usr", "--include=" + basePackages}
	if sources.keyring != "" {
		args = append(args, "--keyring="+sources.keyring)
	}
	args = append(args, baseSuite, root)
	if sources.mirror != "" {
		args = append(args, sources.mirror)
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "HOME=/root",
		"DEBIAN_FRONTEND=noninteractive",
	}, proxyEnv(ctx)...)
	// The first process of the pid namespace: killing it kills all.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Unshareflags: syscall.CLONE_NEWNS}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start debootstrap: %w", err)
	}
	last := follow(out, progress)
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		log, _ := os.ReadFile(filepath.Join(root, "debootstrap/debootstrap.log"))
		return errs.Wrap(fmt.Errorf("debootstrap: %w: %s\n%s", err, last, tail(string(log), 20)), errs.Unavailable,
			"debootstrap could not build the root file system: %s", last).
			WithHint("check that this machine can reach its Debian mirror: apt-get update")
	}
	return nil
}

// expectedPackages is how many packages base had when this was written; only progress depends on it.
const expectedPackages = 175

// follow turns debootstrap's lines into progress until the stream ends, and returns the last one.
func follow(r io.Reader, progress Progress) string {
	var last string
	counts := map[string]int{}
	fraction := 0.0
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 64<<10)
	for lines.Scan() {
		line := lines.Text()
		last = line
		step, at := bootstrapStep(strings.TrimPrefix(line, "I: "), counts)
		fraction = max(fraction, at) // stages overlap
		progress(step, fraction, line)
	}
	_, _ = io.Copy(io.Discard, r) // a line too long for the scanner must not block the program
	return last
}

// bootstrapStep returns the step that a line belongs to, and how much of the whole is done then: half
// the time goes into downloads, a quarter each into unpacking and configuring.
func bootstrapStep(line string, counts map[string]int) (string, float64) {
	word, _, _ := strings.Cut(line, " ")
	counts[word]++
	part := func(n, of int) float64 { return min(1, float64(n)/float64(max(1, of))) }
	switch word {
	case "Retrieving", "Validating":
		return "download", 0.5 * part(counts["Validating"], expectedPackages)
	case "Extracting", "Unpacking":
		return "unpack", 0.5 + 0.2*part(counts["Unpacking"], counts["Validating"])
	case "Configuring":
		return "install", 0.7 + 0.25*part(counts["Configuring"], counts["Validating"])
	}
	return "prepare", 0
}

func tail(text string, lines int) string {
	all := strings.Split(strings.TrimRight(text, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// aptSources is where the host gets Debian packages from, as far as that suits the template.
type aptSources struct {
	mirror   string // "" leaves it to debootstrap's default
	security string
	keyring  string
}

// text is a sources.list for inside.
func (a aptSources) text() string {
	if a.mirror == "" {
		return ""
	}
	text := fmt.Sprintf("deb %s %s main\ndeb %s %s-updates main\n", a.mirror, baseSuite, a.mirror, baseSuite)
	if a.security != "" {
		text += fmt.Sprintf("deb %s %s-security main\n", a.security, baseSuite)
	}
	return text
}

// readAptSources looks for the template's release in the host's apt configuration, in both formats of
// sources.list(5). A host of another release tells nothing that helps.
func readAptSources(dir string) aptSources {
	var a aptSources
	files, _ := filepath.Glob(filepath.Join(dir, "sources.list.d/*"))
	for _, name := range append(files, filepath.Join(dir, "sources.list")) {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		if strings.HasSuffix(name, ".sources") {
			a.addStanzas(string(data))
		} else {
			a.addLines(string(data))
		}
	}
	return a
}

func (a *aptSources) add(uri, suite, keyring string) {
	// Files and CD-ROMs of the host mean nothing inside; a password in a URL must not get there.
	if !strings.HasPrefix(uri, "http://") && !strings.HasPrefix(uri, "https://") || strings.Contains(uri, "@") {
		return
	}
	uri = strings.TrimSuffix(uri, "/")
	switch {
	case suite == baseSuite && a.mirror == "":
		a.mirror = uri
		if strings.HasPrefix(keyring, "/") {
			a.keyring = keyring
		}
	case suite == baseSuite+"-security" && a.security == "":
		a.security = uri
	}
}

// addLines reads the one-line format: deb [options] uri suite component…
func (a *aptSources) addLines(text string) {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		if open := strings.Index(line, "["); open >= 0 {
			if end := strings.Index(line, "]"); end > open {
				line = line[:open] + line[end+1:]
			}
		}
		if f := strings.Fields(line); len(f) >= 4 && f[0] == "deb" && f[3] == "main" {
			a.add(f[1], f[2], "")
		}
	}
}

// addStanzas reads the deb822 format.
func (a *aptSources) addStanzas(text string) {
	for stanza := range strings.SplitSeq(text, "\n\n") {
		field := map[string]string{}
		for line := range strings.Lines(stanza) {
			if key, value, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, " ") {
				field[strings.ToLower(key)] = strings.TrimSpace(value)
			}
		}
		if !strings.Contains(" "+field["components"]+" ", " main ") || field["enabled"] == "no" {
			continue
		}
		for uri := range strings.FieldsSeq(field["uris"]) {
			for suite := range strings.FieldsSeq(field["suites"]) {
				a.add(uri, suite, field["signed-by"])
			}
		}
	}
}

// proxyEnv returns the proxy that the host's apt uses, for debootstrap's downloads.
func proxyEnv(ctx context.Context) []string {
	var env []string
	for _, name := range []string{"http_proxy", "https_proxy", "no_proxy"} {
		if v := os.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	out, err := exec.CommandContext(ctx, "apt-config", "shell", "H", "Acquire::http::Proxy", "S", "Acquire::https::Proxy").Output()
	if err != nil {
		return env // the host has no apt: a Debian mirror may still be in reach
	}
	for line := range strings.Lines(string(out)) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		value = strings.Trim(value, "'")
		if !ok || value == "" || value == "DIRECT" {
			continue
		}
		env = append(env, map[string]string{"H": "http_proxy=", "S": "https_proxy="}[name]+value)
	}
	return env
}

package bench

import (
	"context"
	_ "embed" // the peer's program
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"casemate.dev/client"
)

// onePlusOne runs 1+1 in a context and checks the result.
func (b *bench) onePlusOne(ctx context.Context, sandbox, id string) error {
	out, err := b.c.Contexts.Execute(ctx, sandbox, &client.CodeSpec{Context: id, Code: "1+1"})
	if err != nil {
		return err
	}
	if r := out.GetResults(); len(r) != 1 || r[0].GetData()["text/plain"] != "2" {
		return fmt.Errorf("1+1 ended as %s with %d results", out.GetRun().GetEnd(), len(r))
	}
	return nil
}

// contextWarm times 1+1 in a warm Python context, beside jupyter_client driving an ipykernel.
func contextWarm(ctx context.Context, b *bench) (Row, error) {
	var all []time.Duration
	err := b.withSandbox(ctx, func(id string) error {
		c, err := b.c.Contexts.Create(ctx, id, &client.ContextSpec{Language: "python"})
		if err != nil {
			return err
		}
		call := func() error { return b.onePlusOne(ctx, id, c.GetId()) }
		if _, err = repeat(ctx, 20, call); err == nil {
			all, err = repeat(ctx, b.rounds(2000), call)
		}
		return err
	})
	if err != nil {
		return Row{}, err
	}
	r := Row{Unit: "ms", Stats: oneByOne(all), Peers: map[string]Stats{}}
	r.budget("p50 ≤ 1 ms", r.P50, 1, 0)
	other, err := b.jupyter(ctx)
	switch {
	case errors.Is(err, errNoJupyter):
		r.Note = "no jupyter_client to compare with: --jupyter installs it into a cache"
	case err != nil:
		return Row{}, err
	default:
		r.Peers["jupyter"] = other
		r.budget("p50 ≤ jupyter's / 3", r.P50, other.P50/3, other.P50)
	}
	return r, nil
}

// contextFresh times 1+1 in a fork of a warm interpreter of its own, beside a plain fork of the same
// interpreter, plain fork and exec, and a python3 that is started each time, in turns.
func contextFresh(ctx context.Context, b *bench) (Row, error) {
	const turns = 5
	var all, plain, python []time.Duration
	var floor Stats
	err := b.withSandbox(ctx, func(id string) error {
		fresh := func() error {
			out, err := b.c.Contexts.Execute(ctx, id, &client.CodeSpec{Code: "1+1", Fresh: true})
			if err == nil && len(out.GetResults()) != 1 {
				err = fmt.Errorf("1+1 ended as %s", out.GetRun().GetEnd())
			}
			return err
		}
		started := func() error {
			res, err := b.c.Processes.Execute(ctx, id, &client.ProcessSpec{Argv: []string{"python3", "-c", "print(1+1)"}}, nil)
			if err == nil && string(res.GetStdout()) != "2\n" {
				err = fmt.Errorf("python3 ended as %s", res.GetProcess().GetEnd())
			}
			return err
		}
		if _, err := repeat(ctx, 5, fresh); err != nil {
			return err
		}
		for range turns {
			took, err := repeat(ctx, b.rounds(500)/turns, fresh)
			if err != nil {
				return err
			}
			all = append(all, took...)
			if took, err = b.plainForks(ctx, id, b.rounds(500)/turns); err != nil {
				return err
			}
			plain = append(plain, took...)
			if took, err = repeat(ctx, max(1, b.rounds(50)/turns), started); err != nil {
				return err
			}
			python = append(python, took...)
			s, err := b.floor.round(ctx, 1, b.rounds(500))
			if err != nil {
				return err
			}
			if s.Rate > floor.Rate {
				floor = s
			}
		}
		return nil
	})
	if err != nil {
		return Row{}, err
	}
	fork := summarize(plain)
	r := Row{Unit: "ms", Stats: summarize(all), Peers: map[string]Stats{
		"fork+exec": floor, "os.fork": fork, "python3 -c": summarize(python),
	}}
	r.budget("p50 ≤ os.fork + 2 ms", r.P50, fork.P50+2, fork.P50)
	r.budget("p99 ≤ os.fork + 5 ms", r.P99, fork.P99+5, fork.P99)
	each := r.Peers["python3 -c"].P50
	r.budget("p50 ≤ python3 -c / 5", r.P50, each/5, each)
	return r, nil
}

//go:embed fork.py
var forkProgram string

// plainForks times the peer of a fresh run: a context's own interpreter forks, the child runs the code and
// writes what it shows into a pipe, and its end is waited for. There is no server in it, and no place of
// its own for the child.
func (b *bench) plainForks(ctx context.Context, sandbox string, rounds int) ([]time.Duration, error) {
	out, err := b.c.Contexts.Execute(ctx, sandbox, &client.CodeSpec{
		Language: "python", Code: fmt.Sprintf("N, CODE = %d, '1+1'\n%s", max(1, rounds), forkProgram),
	})
	if err != nil {
		return nil, err
	}
	return micros("os.fork", []byte(out.GetStdout()))
}

// micros reads what a peer printed: a list of microseconds.
func micros(peer string, text []byte) ([]time.Duration, error) {
	var list []float64
	if err := json.Unmarshal(text, &list); err != nil || len(list) == 0 {
		return nil, fmt.Errorf("%s printed %q", peer, text)
	}
	all := make([]time.Duration, len(list))
	for i, us := range list {
		all[i] = time.Duration(us * float64(time.Microsecond))
	}
	return all, nil
}

// contexts8 has eight clients run 1+1 for a while, each in a context of its own.
func contexts8(ctx context.Context, b *bench) (Row, error) {
	const clients = 8
	length := 4 * time.Second
	if b.o.Quick {
		length = 500 * time.Millisecond
	}
	var mu sync.Mutex
	var all []time.Duration
	var took time.Duration
	err := b.withSandbox(ctx, func(id string) error {
		name := func(i int) string { return "bench-" + strconv.Itoa(i) }
		if err := atOnce(clients, func(i int) error {
			_, err := b.c.Contexts.Create(ctx, id, &client.ContextSpec{Id: name(i), Language: "python"})
			if err == nil {
				err = b.onePlusOne(ctx, id, name(i))
			}
			return err
		}); err != nil {
			return err
		}
		begun := time.Now()
		err := atOnce(clients, func(i int) error {
			for time.Since(begun) < length {
				one, err := repeat(ctx, 1, func() error { return b.onePlusOne(ctx, id, name(i)) })
				if err != nil {
					return err
				}
				mu.Lock()
				all = append(all, one...)
				mu.Unlock()
			}
			return nil
		})
		took = time.Since(begun)
		return err
	})
	if err != nil {
		return Row{}, err
	}
	r := Row{Unit: "ms", Stats: summarize(all)}
	r.Rate = float64(len(all)) / took.Seconds()
	r.atLeast("rate ≥ 2,000", r.Rate, 2000, 0)
	return r, nil
}

//go:embed jupyter.py
var jupyterProgram string

// errNoJupyter says that there is no Jupyter, and nobody asked to install it.
var errNoJupyter = errors.New("jupyter_client is not installed")

// jupyterPackages are what the peer is made of.
func jupyterPackages() []string { return []string{"jupyter_client==8.6.3", "ipykernel==6.29.5"} }

// jupyter times 1+1 in the peer. It lives in a virtual environment in the user's cache.
func (b *bench) jupyter(ctx context.Context) (Stats, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return Stats{}, err
	}
	dir := filepath.Join(cache, "casemate", "bench-jupyter")
	python := filepath.Join(dir, "bin", "python")
	if exec.CommandContext(ctx, python, "-c", "import jupyter_client, ipykernel").Run() != nil {
		if !b.o.Jupyter {
			return Stats{}, errNoJupyter
		}
		if err := installJupyter(ctx, dir); err != nil {
			return Stats{}, err
		}
	}
	cmd := exec.CommandContext(ctx, python, "-", strconv.Itoa(b.rounds(500)))
	cmd.Stdin = strings.NewReader(jupyterProgram)
	cmd.Stderr = os.Stderr
	// The kernel that is installed in the environment, and nobody's settings.
	cmd.Env = append(os.Environ(), "JUPYTER_PATH="+filepath.Join(dir, "share", "jupyter"), "IPYTHONDIR="+filepath.Join(dir, "ipython"))
	out, err := cmd.Output()
	if err != nil {
		return Stats{}, fmt.Errorf("run jupyter_client: %w", err)
	}
	all, err := micros("jupyter_client", out)
	if err != nil {
		return Stats{}, err
	}
	return summarize(all), nil
}

func installJupyter(ctx context.Context, dir string) error {
	for _, argv := range [][]string{
		{"python3", "-m", "venv", dir},
		append([]string{filepath.Join(dir, "bin", "pip"), "install", "--quiet", "--disable-pip-version-check"}, jupyterPackages()...),
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("install jupyter_client: %s: %w\n%s", argv[0], err, out)
		}
	}
	return nil
}

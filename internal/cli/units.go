package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// size is a flag value in bytes, written as 512m, 1g or 1.5GiB.
type size int64

// String implements pflag.Value.
func (s *size) String() string {
	if *s == 0 {
		return ""
	}
	return formatSize(int64(*s))
}

// Type implements pflag.Value.
func (s *size) Type() string { return "SIZE" }

// Set implements pflag.Value.
func (s *size) Set(text string) error {
	n, err := parseSize(text)
	if err != nil {
		return err
	}
	*s = size(n)
	return nil
}

// parseSize reads a number of bytes with an optional unit; units are powers of 1024 however they
// are written, as in Docker's and systemd's options.
func parseSize(text string) (int64, error) {
	t := strings.ToLower(strings.TrimSpace(text))
	t = strings.TrimSuffix(strings.TrimSuffix(t, "b"), "i")
	shift := 0
	if t != "" {
		if i := strings.IndexByte("kmgtp", t[len(t)-1]); i >= 0 {
			shift = 10 * (i + 1)
			t = t[:len(t)-1]
		}
	}
	f, err := strconv.ParseFloat(strings.TrimSpace(t), 64)
	if err != nil || math.IsNaN(f) || f < 0 {
		return 0, fmt.Errorf("%q is no size; write it as 512m or 1.5g", text)
	}
	n := math.Ldexp(f, shift)
	if n >= math.MaxInt64 {
		return 0, fmt.Errorf("%q is too large", text)
	}
	return int64(n), nil
}

// formatSize writes n bytes for people, with at most one decimal.
func formatSize(n int64) string {
	if n < 0 {
		return "-" + formatSize(-n)
	}
	if n < 1024 {
		return strconv.FormatInt(n, 10) + " B"
	}
	f, unit := float64(n), -1
	for f >= 1024 && unit < 4 {
		f /= 1024
		unit++
	}
	text := strconv.FormatFloat(math.Round(f*10)/10, 'f', -1, 64)
	return text + " " + string("KMGTP"[unit]) + "iB"
}

// money is a flag value in millionths of a unit of money, written as 5 or 0.25.
type money int64

// moneyDigits is how many digits stand behind the point.
const moneyDigits = 6

// String implements pflag.Value.
func (m *money) String() string {
	if *m == 0 {
		return ""
	}
	return formatMoney(int64(*m))
}

// Type implements pflag.Value.
func (m *money) Type() string { return "AMOUNT" }

// Set implements pflag.Value.
func (m *money) Set(text string) error {
	whole, part, _ := strings.Cut(strings.TrimSpace(text), ".")
	digits := strings.TrimRight(part, "0")
	if whole+part == "" || strings.Trim(whole+part, "0123456789") != "" || len(digits) > moneyDigits {
		return fmt.Errorf("%q is no amount; write it as 5 or 0.25, with at most %d digits behind the point", text, moneyDigits)
	}
	n, err := strconv.ParseInt(whole+digits+strings.Repeat("0", moneyDigits-len(digits)), 10, 64)
	if err != nil {
		return fmt.Errorf("%q is too large", text)
	}
	*m = money(n)
	return nil
}

// formatMoney writes an amount with two digits behind the point, or as many as it has.
func formatMoney(n int64) string {
	sign := ""
	if n < 0 {
		sign, n = "-", -n
	}
	text := fmt.Sprintf("%s%0*d", sign, moneyDigits+1, n)
	at := len(text) - moneyDigits
	part := strings.TrimRight(text[at:], "0")
	for len(part) < 2 {
		part += "0"
	}
	return text[:at] + "." + part
}

// formatDuration writes d with the precision that a person reads: 950µs, 4.2ms, 1.5s, 2m10s, 3h5m.
func formatDuration(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + formatDuration(-d)
	case d < time.Millisecond:
		return strconv.FormatInt(d.Microseconds(), 10) + "µs"
	case d < 10*time.Millisecond:
		return strconv.FormatFloat(float64(d.Microseconds())/1000, 'f', 1, 64) + "ms"
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + "ms"
	case d < time.Minute:
		return strings.TrimSuffix(strconv.FormatFloat(d.Seconds(), 'f', 1, 64), ".0") + "s"
	case d < time.Hour:
		return trimZero(d.Round(time.Second).String(), "0s")
	case d < 48*time.Hour:
		return trimZero(trimZero(d.Round(time.Minute).String(), "0s"), "0m")
	}
	return strconv.Itoa(int(d.Hours()/24)) + "d"
}

// trimZero removes a trailing zero unit of a duration, never one that is all of it.
func trimZero(text, zero string) string {
	cut := strings.TrimSuffix(text, zero)
	if cut == "" || cut[len(cut)-1] < 'a' {
		return text
	}
	return cut
}

// plural writes n with the word that fits it.
func plural(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.FormatInt(n, 10) + " " + many
}

// ago writes how long ago t was, as a phrase.
func ago(t, now time.Time) string {
	if t.IsZero() {
		return "at an unknown time"
	}
	if now.Sub(t) < time.Second {
		return "just now"
	}
	return formatAge(t, now) + " ago"
}

// formatAge writes how long ago t was.
func formatAge(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	d := now.Sub(t)
	if d < time.Second {
		return "now"
	}
	return formatDuration(d.Truncate(time.Second))
}

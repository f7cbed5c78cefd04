package cli

import (
	"testing"
	"time"
)

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "1": 1, "1k": 1 << 10, "512m": 512 << 20, "512M": 512 << 20, "512mb": 512 << 20, "512MiB": 512 << 20,
		"1.5g": 3 << 29, "2T": 2 << 40, " 10 k ": 10 << 10, "7b": 7,
	} {
		if got, err := parseSize(in); err != nil || got != want {
			t.Errorf("parseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "m", "12x", "-1", "1e99g", "NaN", "0x10", "1 2"} {
		if n, err := parseSize(in); err == nil {
			t.Errorf("parseSize(%q) = %d, want an error", in, n)
		}
	}
}

func TestFormatSizeAndBack(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 512 << 20: "512 MiB", 1 << 30: "1 GiB", 5 << 40: "5 TiB",
	} {
		if got := formatSize(n); got != want {
			t.Errorf("formatSize(%d) = %s, want %s", n, got, want)
		}
		if back, err := parseSize(formatSize(n)); err != nil || back != n {
			t.Errorf("parseSize(%s) = %d, %v", formatSize(n), back, err)
		}
	}
}

func TestMoney(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "5": 5_000_000, "2.50": 2_500_000, "0.000001": 1, ".5": 500_000, "3.": 3_000_000, "1.1000000": 1_100_000,
	} {
		var m money
		if err := m.Set(in); err != nil || int64(m) != want {
			t.Errorf("%q is %d, %v; want %d", in, m, err, want)
		}
	}
	for _, in := range []string{"", ".", "-1", "+1", "1e3", "0.0000001", "1,5", "$5", "99999999999999", "1.2.3", "NaN"} {
		var m money
		if err := m.Set(in); err == nil {
			t.Errorf("%q is %d, want an error", in, m)
		}
	}
	for n, want := range map[int64]string{0: "0.00", 1: "0.000001", 2_500_000: "2.50", 1_234_000_000: "1234.00", 123_456: "0.123456"} {
		if got := formatMoney(n); got != want {
			t.Errorf("%d is written as %s, want %s", n, got, want)
		}
	}
}

func TestFormatDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0µs", 950 * time.Microsecond: "950µs", 4200 * time.Microsecond: "4.2ms", 42 * time.Millisecond: "42ms",
		time.Second: "1s", 1500 * time.Millisecond: "1.5s", 10 * time.Second: "10s", time.Minute: "1m", 130 * time.Second: "2m10s",
		time.Hour: "1h", 3*time.Hour + 5*time.Minute: "3h5m", 20 * time.Minute: "20m", 49 * time.Hour: "2d",
		-time.Second: "-1s",
	} {
		if got := formatDuration(d); got != want {
			t.Errorf("formatDuration(%v) = %s, want %s", d, got, want)
		}
	}
}

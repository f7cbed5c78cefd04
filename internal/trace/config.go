package trace

import (
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/otlp"
)

// Config says where spans go, and of what they are.
type Config struct {
	// Endpoint is the URL of a collector that takes OTLP over HTTP; "": there is none, and New returns nil.
	Endpoint string
	// Header goes with every request.
	Header http.Header
	// Service names the server among others; Version and Instance are its own.
	Service, Version, Instance string
	// Attributes tell more about it, and go before Version and Instance.
	Attributes map[string]string
	// Log hears of spans that could not be sent; nil: nobody does.
	Log *slog.Logger

	sample sampler
}

// FromEnv reads the variables that OpenTelemetry's SDKs read
// (https://opentelemetry.io/docs/specs/otel/protocol/exporter/, …/configuration/sdk-environment-variables/), as far as
// they are about traces. endpoint, where it is given, goes before theirs. InvalidArgument: one says what can't be done here.
func FromEnv(getenv func(string) string, endpoint string) (Config, error) {
	first := func(names ...string) string {
		for _, n := range names {
			if v := strings.TrimSpace(getenv(n)); v != "" {
				return v
			}
		}
		return ""
	}
	cfg := Config{Service: "casemate", Attributes: map[string]string{}, Header: http.Header{}, sample: sampler{byParent: true, share: 1}}
	cfg.Endpoint = endpoint
	if cfg.Endpoint == "" {
		cfg.Endpoint = first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
	}
	if strings.EqualFold(first("OTEL_SDK_DISABLED"), "true") || first("OTEL_TRACES_EXPORTER") == "none" && endpoint == "" {
		cfg.Endpoint = ""
	}
	if cfg.Endpoint == "" {
		return cfg, nil
	}
	if u, err := url.Parse(cfg.Endpoint); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return cfg, errs.New(errs.InvalidArgument, "the endpoint for traces is no http or https URL").WithHint("as http://localhost:4318")
	}
	if p := first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"); p == "grpc" && endpoint == "" {
		return cfg, errs.New(errs.InvalidArgument, "traces are sent over HTTP, and OTEL_EXPORTER_OTLP_PROTOCOL asks for gRPC").
			WithHint("set it to http/json and the endpoint to the collector's port for HTTP, mostly 4318; OTEL_TRACES_EXPORTER=none has no traces")
	}
	for name, v := range pairs(first("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")) {
		cfg.Header.Set(name, v)
	}
	cfg.Attributes = pairs(first("OTEL_RESOURCE_ATTRIBUTES"))
	if s := cfg.Attributes["service.name"]; s != "" {
		cfg.Service = s
	}
	if s := first("OTEL_SERVICE_NAME"); s != "" {
		cfg.Service = s
	}
	delete(cfg.Attributes, "service.name")
	return cfg, cfg.sampleBy(first("OTEL_TRACES_SAMPLER"), first("OTEL_TRACES_SAMPLER_ARG"))
}

// sampleBy takes the names of OpenTelemetry's samplers.
func (c *Config) sampleBy(name, arg string) error {
	kind, byParent := strings.CutPrefix(name, "parentbased_")
	switch kind {
	case "":
	case "always_on":
		c.sample = sampler{byParent: byParent, share: 1}
	case "always_off":
		c.sample = sampler{byParent: byParent}
	case "traceidratio":
		share := 1.0
		if arg != "" {
			var err error
			if share, err = strconv.ParseFloat(arg, 64); err != nil || !(share >= 0 && share <= 1) {
				return errs.New(errs.InvalidArgument, "OTEL_TRACES_SAMPLER_ARG is no number from 0 to 1")
			}
		}
		c.sample = sampler{byParent: byParent, share: share}
	default:
		return errs.New(errs.InvalidArgument, "OTEL_TRACES_SAMPLER names a sampler that there is not").
			WithHint("use always_on, always_off or traceidratio, each with parentbased_ before it or without")
	}
	return nil
}

// pairs reads key=value,… whose values are percent-encoded. What is no pair is left out, as the SDKs do.
func pairs(text string) map[string]string {
	out := map[string]string{}
	for part := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(part, "=")
		if key = strings.TrimSpace(key); !ok || key == "" {
			continue
		}
		if v, err := url.PathUnescape(strings.TrimSpace(value)); err == nil {
			out[key] = v
		}
	}
	return out
}

// resource tells what the spans are of.
func (c Config) resource() []otlp.Attribute {
	all := map[string]string{"service.name": c.Service, "service.version": c.Version, "service.instance.id": c.Instance}
	maps.Copy(all, c.Attributes)
	out := make([]otlp.Attribute, 0, len(all))
	for _, k := range slices.Sorted(maps.Keys(all)) {
		out = append(out, otlp.Text(k, all[k]))
	}
	return out
}

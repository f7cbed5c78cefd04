# Casemate's build. `make` alone lists what there is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
# Where Go lies unless somebody says otherwise (go.dev/doc/install).
export PATH := $(PATH):/usr/local/go/bin
GOARCH ?= $(shell PATH="$(PATH)" go env GOARCH)
# Static programs: no C library decides how a name is resolved or a user looked up.
export CGO_ENABLED ?= 0

BIN := bin
TOOLS := $(BIN)/tools
GUESTS := internal/guestbin/bin
GUEST := $(GUESTS)/guest-linux-$(GOARCH)
LDFLAGS := -s -w -X main.version=$(VERSION)
# Packages in which several threads of control share state; the race detector runs over these.
RACE := ./client/... ./internal/api/... ./internal/e2b/... ./internal/egress/... ./internal/guest/... ./internal/guestwire/... ./internal/isolation/... \
	./internal/journal/... ./internal/linux/... ./internal/policy/... ./internal/rootfs/... ./internal/sandbox/... \
	./internal/secret/... ./internal/server/... ./internal/store/...
# Tests that only "unit" runs: five hold programs to memory or time, many times of which the detector needs itself,
# one makes a system call on all threads, which Go offers to programs without cgo only, and one tries what runsc does,
# which the detector sees nothing of.
WITHOUTRACE := ^(TestGvisorConformance|TestIdleMemory|TestHugeOutput|TestLimitProcess|TestManyIdle|TestUnreadIsBounded|TestHalfOpenDoesNotSlowOthers)$$
GOFILES = $(shell git ls-files --cached --others --exclude-standard '*.go' | grep -v '\.pb\.go$$\|\.connect\.go$$')
TESTTIMEOUT ?= 15m
FUZZTIME ?= 60s

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

# --- build -------------------------------------------------------------------------------------

.PHONY: setup
setup: ## Install the Debian packages that Casemate and its tests use (only what is missing)
	@deploy/setup.sh --tests

.PHONY: build
build: guest ## Build bin/casemate with the guest inside it
	go build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/casemate ./cmd/casemate

.PHONY: guest
guest: ## Build the guest, the first process of each sandbox, for GOARCH
	@find $(GUESTS) -name 'guest-linux-*' ! -name '$(notdir $(GUEST))' -delete # what lies there is embedded
	GOOS=linux GOARCH=$(GOARCH) go build -trimpath -ldflags '-s -w' -o $(GUEST) ./cmd/casemate-guest

.PHONY: install
install: build ## Install the program, completions and systemd unit (PREFIX=/usr/local)
	deploy/install-files.sh $(BIN)/casemate "$${DESTDIR:-}" "$${PREFIX:-/usr/local}"

.PHONY: dist
dist: ## Static tarballs for amd64 and arm64, a Debian package each, checksums, in dist/
	VERSION='$(VERSION)' deploy/dist.sh $(if $(NATIVE),native)

.PHONY: clean
clean: ## Remove what the build made
	rm -rf $(BIN)/casemate dist $(GUESTS)/guest-linux-*

# --- run ---------------------------------------------------------------------------------------

.PHONY: demo
demo: ## Show Casemate at work: a sandbox, a small agent's task in it, what it changed
	./demo.sh

# --- check -------------------------------------------------------------------------------------

.PHONY: test
test: setup check unit race e2b cross ## Everything that must hold before a change lands (as root)
	@echo 'all checks and tests passed'

.PHONY: check
check: fmt vet lint ## Format, vet and lint

.PHONY: fmt
fmt: $(TOOLS)/.stamp ## Fail on files that gofumpt would change
	@out=$$($(TOOLS)/gofumpt -l $(GOFILES)); if [ -n "$$out" ]; then echo "run gofumpt -w on:"; echo "$$out"; exit 1; fi

.PHONY: vet
vet: guest ## go vet over everything
	go vet ./...

.PHONY: lint
lint: $(TOOLS)/.stamp ## staticcheck and golangci-lint (with the import law)
	$(TOOLS)/staticcheck ./...
	$(TOOLS)/golangci-lint run --allow-parallel-runners ./...

.PHONY: unit
unit: guest test-python test-clients runsc $(TOOLS)/.stamp ## Unit tests, tests of the kernel's walls, scripts over the whole product
	test/gotest.sh ./... -timeout $(TESTTIMEOUT)

.PHONY: test-python
test-python: .cache/python/.stamp ## Python packages for the tests of code contexts, into .cache (needs PyPI)

.cache/python/.stamp: internal/rootfs/code-interpreter.txt
	/usr/bin/python3 -m venv --clear .cache/python
	.cache/python/bin/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r $<
	@touch $@

.PHONY: test-clients
test-clients: .cache/wheels/.stamp .cache/npm/.stamp .cache/npm-e2b/.stamp ## Clients' packages for tests, into .cache (needs PyPI and npm)

.cache/wheels/.stamp: test/clients/requirements.txt test/e2b/python/requirements.txt
	/usr/bin/python3 -m venv --clear $(@D)
	$(@D)/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: -d $(@D)/all -r test/clients/requirements.txt
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r test/e2b/python/requirements.txt
	@touch $@

.cache/npm/.stamp: test/clients/js/package-lock.json
.cache/npm-e2b/.stamp: test/e2b/js/2.51/package-lock.json
.cache/npm/.stamp .cache/npm-e2b/.stamp:
	rm -rf $(@D)
	mkdir -p $(@D)
	cp $(dir $<)package.json $< $(@D)/
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# gVisor's runsc, of the release that go.mod names, outside of this module's graph: in it, the runtime-spec of others
# breaks its build. Where casemate looks first is beside itself.
RUNSC_VERSION = $(shell PATH="$(PATH)" go list -m -f '{{.Version}}' gvisor.dev/gvisor)

.PHONY: runsc
runsc: $(BIN)/runsc ## Build gVisor's runsc for isolation gvisor, about three minutes the first time (needs Go's module proxy)

$(BIN)/runsc: .cache/runsc/.stamp
	@mkdir -p $(BIN)
	ln -sf ../.cache/runsc/runsc $@

.cache/runsc/.stamp: go.mod
	@mkdir -p $(@D)
	@[ "$$($(@D)/runsc --version 2>/dev/null | head -n 1)" = "runsc version $(RUNSC_VERSION)" ] || { set -x; cd / && \
		GOFLAGS= GOBIN="$(CURDIR)/$(@D)" CGO_ENABLED=0 GOARCH= go install -trimpath \
		-ldflags '-X gvisor.dev/gvisor/runsc/version.version=$(RUNSC_VERSION)' gvisor.dev/gvisor/runsc@$(RUNSC_VERSION); }
	@chmod go-w $(@D)/runsc # casemate takes none that others than root can change
	@touch $@

.PHONY: race
race: guest runsc $(TOOLS)/.stamp ## The concurrent packages under the race detector
	CGO_ENABLED=1 test/gotest.sh '$(RACE)' -race -timeout $(TESTTIMEOUT) -skip '$(WITHOUTRACE)'

.PHONY: e2b
e2b: build runsc ## E2B's own SDKs against servers, about three minutes (with their registries, the first time)
	test/e2b/run.sh $(SUITES)

.PHONY: e2b-speed
e2b-speed: build ## Measure what E2B's SDK gets, beside bubblewrap (as e2b)
	test/e2b/speed.sh

.PHONY: riders
riders: build ## What is built on E2B's SDKs, MCP's official clients, the examples; two minutes, the first time five (as e2b)
	test/riders/run.sh $(SUITES)

.PHONY: cross
cross: ## Build and vet for arm64
	GOARCH=arm64 go build -trimpath -o /dev/null ./cmd/casemate
	GOARCH=arm64 go build -trimpath -o /dev/null ./cmd/casemate-guest
	GOARCH=arm64 go vet ./...

.PHONY: battery
battery: build runsc ## Attack every isolation, runc and bubblewrap beside, and write docs/security.md's table; a quarter of an hour (as root; DIR keeps base)
	go run ./test/battery $(if $(DIR),-dir $(DIR))

.PHONY: bench
bench: build ## Measure against fork+exec, bubblewrap and runc on this machine
	test/bench.sh $(if $(ONLY),--only $(ONLY))

.PHONY: nightly
nightly: build test-python test-clients runsc ## The long ones: tests without a second try, fuzzing, soak, building base, others' clients, QEMU
	FUZZTIME=$(FUZZTIME) test/nightly.sh

# --- generate ----------------------------------------------------------------------------------

.PHONY: tools
tools: $(TOOLS)/.stamp ## Build the pinned tools of tools/go.mod into bin/tools

$(TOOLS)/.stamp: tools/go.mod tools/go.sum
	GOBIN=$(CURDIR)/$(TOOLS) go -C tools install tool
	@touch $@

.PHONY: generate
generate: $(TOOLS)/.stamp ## Generate code and the OpenAPI document from proto/, and docs/cli
	CASEMATE_TOOLS="$(CURDIR)/$(TOOLS)" proto/generate.sh
	$(MAKE) docs

.PHONY: docs
docs: ## Write the CLI reference, docs/cli, and the catalogue of events, docs/events.md
	go run ./cmd/casemate docs docs/cli
	UPDATE_DOCS=1 go test -count=1 -run TestEventsPage ./docs

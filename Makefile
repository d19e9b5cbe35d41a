# Begin with `make demo` and `make test`; docs/internals/tests.md says what the other checks are.
CARGO ?= cargo
# Cargo beside other targets: it would take its processes from those of `make -j`, which make keeps to itself.
CARGO_BESIDE := env -u MAKEFLAGS -u MFLAGS $(CARGO)
BATON := target/release/baton
# The command that `make test` tests.
CHECKED := target/checked/baton
# Seed of the fuzz targets: each commit tries other scripts.
COMMIT_SEED := $(shell printf %d 0x$$(git rev-parse --short=7 HEAD 2>/dev/null || echo 1))

.PHONY: demo test check fuzz build lint style clippy no-std checked ring-model test-packages figures sim-seeds sim-crashes dependencies soak sim lab programs restarts suites numa bench provider rmpp conformance hostile differential foreign-calls packetdrill-adapter packetdrill package operate guest fleet fleet-tests clean

# The demonstration compiles what it runs: neither the benches nor the simulator, and without the optimisation across crates that takes
# half of the time of the benches' build. The command line is optimised, which it is not for the tests: the demonstration's server is in it.
demo: dependencies
	@echo "Compiling what the demonstration needs, without optimisation across crates (make build: with it, benches and all)"
	$(CARGO) build --profile checked --locked -p baton -p baton-preload --no-default-features \
	  --config profile.checked.package.baton.opt-level=3
	target/checked/baton demo

build: dependencies
	$(CARGO) build --release --locked

dependencies:
	@scripts/dependencies

# Everything that must hold: lints, crates without std, unit and property tests, simulated pairs, the ring's model, the real kernel.
# A test that hangs is killed after twenty minutes, so that the output shows its name. There are no examples in documentation comments
# that could be run. Four tests more run at once than there are processors, since most wait for something most of the time.
# The compiler leaves a processor idle while crates wait for each other, so whatever else compiles does that beside it: two targets at once.
# If one fails, make names it in the last lines, when the other has ended.
test: export BATON_PROGRAM := $(CURDIR)/$(CHECKED)
test: export RUST_TEST_THREADS := $(shell expr $$(nproc) + 4)
test: export BATON_FUZZ_SECONDS := 10
test: export BATON_FUZZ_SEED := $(COMMIT_SEED)
test: style
	$(MAKE) --no-print-directory -j2 checked clippy ring-model no-std test-packages
	$(call provider,checked)
	timeout --foreground 1200 scripts/tests --profile checked --locked --workspace --tests --examples
	$(MAKE) --no-print-directory -j2 figures sim-crashes sim-seeds
	tests/mpi/run.py --quick --mpi debian
	tests/mpi/run.py --quick --nic --mpi debian
	tests/programs/programs.py --seconds 1 --only "python asyncio,python uvloop,python selectors,python ssl,python http.server,python socketserver,python fork,curl,sshd"
	tests/programs/scale.py
	tests/programs/loads.py --all --seconds 1 --only "redis replica,apache,gunicorn" --modes native,default,accepted
	tests/programs/restarts.py --rounds 2
	tests/programs/deaths.py --kill-nic 1 --stop-nic 1
	tests/programs/both_ways.py --rounds 8 --seconds 0.3 --connections 32
	tests/programs/both_ways.py --rounds 2 --seconds 0.3 --connections 256
	tests/programs/both_ways.py --rounds 2 --seconds 1 --connections 64 --kill-nic 2
	tests/programs/waits.py --total-seconds 20
	tests/programs/waits.py --program children --rule flip,accepted --total-seconds 10
	tests/programs/ends.py
	$(CHECKED) bench tail --smoke
	$(CHECKED) soak --connections 64 --moves 2000 --json
	$(CHECKED) soak --connections 64 --moves 1000 --ipv6 --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --delay 5 --json
	$(CHECKED) soak --connections 32 --moves 600 --kill-nic 5 --kill-agent 5 --firewall --json
	$(CHECKED) soak --connections 32 --moves 600 --workers 4 --kill-nic 3 --loss 1 --reorder 2 --json
	$(CHECKED) soak --connections 32 --moves 600 --workers 3 --one-queue --kill-nic 3 --json
	$(CHECKED) soak --beside --connections 16 --moves 200 --kill-nic 1 --stop-nic 1 --json
	$(CHECKED) soak --beside --connections 64 --moves 200 --nic-connections 16 --nic-memory 32M --kill-nic 2 --link-down 2 --peer-fin return --json
	$(CHECKED) soak --connections 32 --moves 300 --ipv6 --link-down 3 --peer-fin keep --json

# All that the tests run.
checked:
	$(CARGO_BESIDE) build --profile checked --locked --workspace --lib --bins --tests --examples

# The ring's model: every order in which its two sides may see each other's writes.
ring-model:
	RUSTFLAGS="--cfg loom" $(CARGO_BESIDE) test --profile checked --locked -p baton-ring --lib --target-dir target/loom

# What runs in virtual time has one thread each, and does not mind what runs beside it.
figures:
	$(CHECKED) lab all --quick --pictures target/figures >/dev/null
	@diff -r docs/papers/figures target/figures >/dev/null || { echo "docs/papers/figures is not what the models say now: make lab" >&2; exit 1; }

# Other seeds for each commit.
sim-seeds:
	$(CHECKED) sim --seeds $(COMMIT_SEED)..$(shell expr $(COMMIT_SEED) + 100) --json

sim-crashes:
	$(CHECKED) sim --exhaustive --stride 31 --json

# Packages that the tests need; and that waiting for the package manager works.
test-packages:
	@scripts/dependencies tests
	tests/setup/locks.py
	@scripts/dependencies mpi

# What every change is tried with first: lints, unit tests, the machine of moves, the simulator for ten seconds. It needs neither root nor
# other packages than the compiler's, and less than a minute where everything is compiled. `make check UNITS=baton-tcp`: one crate's tests.
check: UNITS ?= $(addprefix baton-,wire log shm device netem abi ring image protocol recovery datagrams capture records tcp rmpp resolution \
  tables tso lro moderation rss active-ack copy matching filter offloads placement datapath moves supervision policy core agent keeper client)
check: lint
	$(CARGO) test --profile checked --locked --quiet $(addprefix -p ,$(UNITS)) --lib
	$(CARGO) test --profile checked --locked --quiet -p baton-moves --test walk
	$(CARGO) build --profile checked --locked -p baton --bins
	target/checked/baton sim --seeds 0..3000 --seconds 10 --json

lint: style clippy no-std

# What needs no compiler.
style:
	scripts/edges
	scripts/waits
	scripts/foreign
	scripts/rules
	scripts/rules --try
	$(CARGO) fmt --check

# Cargo locks a directory of what it has compiled: with one of its own clippy runs beside the compiler.
clippy:
	$(CARGO_BESIDE) clippy --profile checked --locked --workspace --target-dir target/clippy -- -D warnings

no-std:
	$(CARGO_BESIDE) build --locked --manifest-path tests/no_std/Cargo.toml --target-dir target/no_std

# Random scripts for all that others can do to Baton: TCP, active acknowledgements, large receive, the filter and RMPP in virtual time, with
# checks of every overflow; frames at a live NIC; what a program can write and send, and what it can call of libfabric.
# `make fuzz SECONDS=3600 SEED=7`. A failure names its seed, or prints a small script that belongs into the corpus: sim/fuzz/corpus,
# host/fabric/src/fuzz/corpus.txt.
fuzz: SECONDS := 3600
fuzz: SEED := $(COMMIT_SEED)
fuzz: export BATON_FUZZ_SECONDS = $(SECONDS)
fuzz: export BATON_FUZZ_SEED = $(SEED)
fuzz:
	CARGO_PROFILE_CHECKED_OVERFLOW_CHECKS=true CARGO_PROFILE_CHECKED_DEBUG_ASSERTIONS=true \
	  $(CARGO) test --profile checked --locked -p baton-fuzz --target-dir target/fuzz -- --nocapture
	$(CARGO) test --profile checked --locked -p baton-datapath --test worker bounds
	$(CARGO) test --profile checked --locked -p baton-fabric --lib -- --nocapture fuzz
	$(CARGO) test --profile checked --locked -p baton --test live -- --nocapture hostile::no_descriptor hostile::words_of_no_session frames::no_frame

# The long form of what `make test` runs for a short while.
soak: build
	for family in "" --ipv6; do for wall in "" --firewall; do \
	  $(BATON) soak --connections 64 --moves 10000 $$family $$wall --json && \
	  $(BATON) soak --connections 64 --moves 10000 $$family $$wall --loss 1 --reorder 2 --duplicate 1 --corrupt 0.1 --delay 5 --json && \
	  $(BATON) soak --connections 64 --moves 4000 $$family $$wall --kill-nic 20 --json && \
	  $(BATON) soak --connections 64 --moves 4000 $$family $$wall --kill-agent 20 --json || exit 1; done; done
	$(BATON) soak --beside --nics 2 --connections 64 --moves 4000 --kill-nic 20 --kill-agent 10 --json
	$(BATON) soak --beside --connections 64 --moves 4000 --kill-nic 20 --stop-nic 20 --json
	$(BATON) soak --connections 64 --moves 1000 --kill-nic 5 --stop-nic 5 --kill-agent 5 --json
	$(BATON) soak --connections 16 --poison --json
	for shape in "" --beside; do \
	  $(BATON) soak $$shape --connections 512 --moves 4000 --nic-connections 128 --nic-memory 32M --kill-nic 10 --link-down 10 --json && \
	  $(BATON) soak $$shape --connections 64 --moves 2000 --ipv6 --kill-agent 5 --link-down 20 --peer-fin return --json || exit 1; done
	tests/programs/deaths.py --kill-nic 20 --stop-nic 20
	tests/programs/starved.py --seconds 600
	BATON_EVERY_CASE=1 $(CARGO) test --profile checked --locked -p baton --test live -- pressure conformance:: a_handler_runs_at_any_instruction
	tests/programs/both_ways.py --rounds 100 --seconds 5
	tests/programs/both_ways.py --rounds 20 --seconds 5 --kill-nic 1 --stop-nic 1 --kill-agent 1
	tests/programs/waits.py --copies 10 --total-seconds 1200
	tests/programs/waits.py --program children --rule flip,accepted --copies 10 --total-seconds 600
	tests/programs/ends.py --rounds 60
	tests/programs/ends.py --rounds 20 --kill nic
	BATON_FUZZ_CASES=200000 $(CARGO) test --profile checked --locked -p baton-datapath --test worker
	BATON_IDLE_SECONDS=60 $(CARGO) test --profile checked --locked -p baton --test live moves::keep_alive
	BATON_PORTS=10000 $(CARGO) test --profile checked --locked -p baton --test live full::ports
	$(MAKE) hostile

# The simulator: many seeds, every crash and every pair of crashes of a move there and back, and the builds sabotaged on purpose.
sim: build
	$(BATON) sim --seeds 0..3000 --json
	$(BATON) sim --exhaustive --json
	scripts/sabotage

# The papers' figures and tables on models that run the real code, as one page, and as those of docs/papers/figures; and that models made
# wrong on purpose change what is reported.
lab: PROFILE ?= release
lab:
	$(CARGO) build --profile $(PROFILE) --locked -p baton --bins
	target/$(PROFILE)/baton lab all --quick --output target/papers.html --pictures docs/papers/figures
	target/$(PROFILE)/baton lab sabotage

# Whole programs, as far as they are installed, and Python's own test suites, while their connections move. Each takes some minutes.
programs: build
	tests/programs/programs.py
	tests/programs/programs.py --network wire
	tests/programs/programs.py --network own
	tests/programs/loads.py
	tests/programs/leaks.py
	tests/programs/clients.py
	BATON_ATTACH_SECONDS=60 $(CARGO) test --profile checked --locked -p baton --test live -- attach::a_proxy attach::a_blocking_client

# Baton is ended and started again under nginx and redis.
restarts: build
	@scripts/dependencies tests
	tests/programs/restarts.py --rounds 20

suites: build
	tests/programs/suites.py
	tests/programs/suites.py --full
	tests/programs/projects.py

# Placement on an emulated machine of two NUMA nodes.
numa: build
	@scripts/dependencies numa
	tests/numa/guest.py

bench: build
	$(BATON) bench datapath --json
	$(BATON) bench lro --json
	$(BATON) bench moderation --json
	$(BATON) bench rss --json
	$(BATON) bench tail --json

# The libfabric provider, under the name by which FI_PROVIDER_PATH finds it, and the library for LD_PRELOAD beside it (docs/guide/mpi.md).
define provider
	mkdir -p target/provider
	cp target/$(1)/librmpp_fi.so target/provider/librmpp-fi.so.new
	mv target/provider/librmpp-fi.so.new target/provider/librmpp-fi.so
	cp target/$(1)/librmpp_memory.so target/provider/librmpp-memory.so.new
	mv target/provider/librmpp-memory.so.new target/provider/librmpp-memory.so
endef

provider:
	$(CARGO) build --release --locked -p baton-fabric -p baton-mpi-memory
	$(call provider,release)

# MPI programs over RMPP on two hosts, with three MPI libraries: Debian's Open MPI, and Open MPI 5 and MPICH 5 in target/mpi.
rmpp: build provider
	@scripts/dependencies mpi
	@scripts/dependencies wheels
	tests/mpi/run.py
	tests/mpi/run.py --nic
	tests/mpi/run.py --ping-pong

# A sample of the matrix of calls: natively, in the kernel under the library, on the NIC and moving (docs/internals/conformance.md). SEED: which;
# CASES=all: all of them.
conformance: SEED ?= $(COMMIT_SEED)
conformance: CASES ?= sample
conformance: export BATON_FUZZ_SEED = $(SEED)
conformance: export BATON_CASES = $(CASES)
conformance:
	$(CARGO) build --profile checked --locked -p baton -p baton-preload
	$(if $(FIRST),BATON_FIRST_CASE=$(FIRST)) $(CARGO) test --profile checked --locked -p baton --test live matrix -- --nocapture

# Programs that are not simple, in hostile surroundings, beside the same natively (docs/internals/tests.md). ROUNDS: in each surrounding;
# SEED: which; SURROUNDING: one of them, such as "few descriptors"; FIRST: from which round on.
hostile: SEED ?= $(COMMIT_SEED)
hostile: ROUNDS ?= 10000
hostile: export BATON_FUZZ_SEED = $(SEED)
hostile: export BATON_ROUNDS = $(ROUNDS)
hostile:
	$(CARGO) build --profile checked --locked -p baton -p baton-preload
	$(if $(FIRST),BATON_FIRST_ROUND=$(FIRST)) $(if $(SURROUNDING),BATON_SURROUNDING="$(SURROUNDING)") \
	  $(CARGO) test --profile checked --locked -p baton --test live surroundings::programs -- --nocapture

# A random peer played to the kernel and to the NIC (docs/internals/conformance.md). SCRIPTS: how many.
differential: SCRIPTS ?= 100000
differential: export BATON_PROGRAM := $(CURDIR)/target/checked/baton
differential:
	$(CARGO) build --profile checked --locked -p baton -p baton-preload
	BATON_SCRIPTS=$(SCRIPTS) $(CARGO) test --profile checked --locked -p baton --test live differential -- --nocapture

# Lists the system calls that the main loops of agent and keeper make on descriptors of other users' programs. Fails on any that may block.
foreign-calls:
	$(CARGO) build --profile checked --locked -p baton -p baton-preload --bins --lib --test live
	scripts/foreign-calls

# The NIC's TCP under packetdrill's scripts (docs/internals/conformance.md). packetdrill itself is not shipped: it is looked for on PATH and in
# PACKETDRILL. ARGUMENTS="--flags move=3" moves the connection through its image before every third event.
packetdrill-adapter:
	$(CARGO) build --release --locked -p baton-packetdrill

packetdrill: packetdrill-adapter
	tests/packetdrill/run.py $(SCRIPTS) $(ARGUMENTS)

# A Debian package, target/debian/baton_*.deb (docs/guide/install.md). PROFILE=checked is built faster and runs slower.
package: PROFILE ?= release
package:
	@scripts/dependencies package
	$(CARGO) build --profile $(PROFILE) --locked -p baton -p baton-preload -p baton-capi -p baton-fabric -p baton-mpi-memory --bins --lib
	scripts/package $(PROFILE)

# The package in a Debian system of its own with systemd: installed, used, upgraded under load, stopped, purged; its image run by podman; and
# what Debian's Prometheus makes of `baton metrics`, its Chromium of `baton page`, and its tshark of what `baton capture` writes.
operate: PROFILE ?= release
operate:
	@scripts/dependencies operate
	$(MAKE) package PROFILE=$(PROFILE)
	tests/operate/metrics.py target/$(PROFILE)/baton
	tests/operate/page.py target/$(PROFILE)/baton
	tests/operate/capture.py target/$(PROFILE)/baton
	tests/operate/package.py target/debian/baton_*.deb
	tests/operate/podman.py target/debian/baton_*.deb target/$(PROFILE)/baton
	$(MAKE) fleet-tests PROFILE=$(PROFILE)

# The package in guests with the distribution's kernels, under emulation (no /dev/kvm needed, and no times compared): KERNEL=6.12, on which
# all of it works, and KERNEL=6.1, on which the service does not start. Half an hour each; kernels are downloaded once.
guest: PROFILE ?= release
guest: KERNEL ?= 6.12 6.1
guest:
	@scripts/dependencies guest
	$(MAKE) package PROFILE=$(PROFILE)
	set -e; for kernel in $(KERNEL); do tests/operate/guest.py $$kernel target/debian/baton_*.deb; done

# Kubernetes' manifests, decoded strictly, and their pods run by podman (docs/operate/kubernetes.md); MPI launchers, and jobs and a job array of
# Debian's Slurm on two nodes of its own (docs/guide/slurm.md). It needs Go 1.26 or later.
fleet: PROFILE ?= release
fleet:
	$(MAKE) package PROFILE=$(PROFILE)
	$(MAKE) fleet-tests PROFILE=$(PROFILE)

# With what `make package` has built.
fleet-tests: PROFILE ?= release
fleet-tests:
	@scripts/dependencies fleet
	@scripts/dependencies wheels
	$(call provider,$(PROFILE))
	cd tests/fleet && go vet ./... && go test ./...
	tests/operate/fleet.py target/debian/baton_*.deb
	tests/operate/slurm.py target/$(PROFILE)/baton

clean:
	$(CARGO) clean

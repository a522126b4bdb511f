# Every target first installs the packages that it lacks: a fresh Debian 12 needs only cargo and rustup, and root.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-ceph test-release test-nbd test-loaded test-repeat test-vm asan fuzz bench xen-bench bench-remote md lab crash state-crash neighbours sim advisories publish-check fmt clean release deb dist model

# Share of fuzzing in seconds, over all targets together.
FUZZ_SECONDS ?=

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo
	@echo '  FUZZ_SECONDS=600 make fuzz    PVBLK_E2E_FULL=1 make test (full sizes and times)'

demo: ## Build, serve a disk over rings and NBD, use it with qemu-img and fio, print rates (a minute, and the build)
	@scripts/install-tools.sh demo
	@$(MAKE) --no-print-directory release
	@scripts/demo.sh

test: ## Format, lints, licences, unit tests, a share of fuzzing, end-to-end tests; the last line is the sum
	@scripts/install-tools.sh test
	@FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) scripts/test.sh

test-loaded: ## The same beside four busy loops: no test may depend on how fast the machine is (90 minutes)
	@scripts/install-tools.sh test
	@scripts/test.sh build
	@FUZZ_SECONDS=$(or $(FUZZ_SECONDS),60) scripts/loaded.sh scripts/test.sh

test-repeat: ## Run each test program that has to do with threads or time RUNS times (50), and print a table (1 hour)
	@scripts/install-tools.sh test
	@scripts/repeat.sh $(or $(RUNS),50)

test-vm: ## Virtual machines on served disks for longer: under QEMU and Xen, queues, file systems, servers killed 20 times (20 minutes)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@cargo build --locked -p pvblk-export --example hostile_front
	@PVBLK_E2E_FULL=1 cargo test -p pvblk-e2e --locked --test vhost_user --test xen

test-release: ## The package in a Debian that systemd boots under QEMU, a release made twice, a guest of libvirt (10 minutes)
	@scripts/install-tools.sh test
	@scripts/install-tools.sh dist
	@$(MAKE) --no-print-directory release
	@PVBLK_E2E_RELEASE=1 cargo test -p pvblk-e2e --locked --test booted --test dist --test recipes -- --nocapture

test-ceph: ## Serve images of a Ceph cluster of this machine for longer: 1000 stolen locks, kills, an OSD stopped for 60 s, 100 images (40 minutes)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@cargo build --locked -p pvblk --features planted --target-dir "$${CARGO_TARGET_DIR:-target}/planted"
	@PVBLK_PLANTED_BIN="$$(realpath "$${CARGO_TARGET_DIR:-target}/planted/debug/pvblk")" PVBLK_E2E_FULL=1 cargo test -p pvblk-e2e --locked --test ceph -- --nocapture

test-nbd: ## Kill NBD servers under volumes that use them, KILLS times for each kind of server (1000), while fio verifies (15 minutes)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@PVBLK_NBD_KILLS=$(or $(KILLS),1000) cargo test -p pvblk-e2e --locked --test nbd_volume -- --nocapture

fuzz: ## Fuzz every target, FUZZ_SECONDS together (600)
	@scripts/install-tools.sh test
	@scripts/fuzz.sh $(or $(FUZZ_SECONDS),600)

bench: ## Measure the rings against a bare ring, NBD and vhost-user-blk against their peers, idle disks, instructions (15 minutes)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" path
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" nbd
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" vhost
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" idle
	@scripts/instructions.sh

xen-bench: ## Compare pvblk, the kernel's blkback and QEMU's qdisk for a guest of Xen: rates, system calls and events of each request (20 minutes)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@tests/vm/xen.sh --script tests/vm/scripts/xen-bench.sh --out "$${CARGO_TARGET_DIR:-target}/xen-bench" \
		--add "$${CARGO_TARGET_DIR:-target}/release/pvblk" --with qdisk --memory 3072 --dom0-memory 1280 --seconds 2400
	@cat "$${CARGO_TARGET_DIR:-target}/xen-bench/log"

bench-remote: ## Compare images of a Ceph cluster of this machine, caches before them, and NBD volumes with their peers, in TURNS turns (5) (an hour; needs a quiet machine)
	@scripts/install-tools.sh bench
	@$(MAKE) --no-print-directory release
	@mkdir -p "$${CARGO_TARGET_DIR:-target}/bench-remote"
	@t="$${CARGO_TARGET_DIR:-target}" turns=$(or $(TURNS),5); \
		scripts/ceph_speed.py "$$t/release/pvblk" --turns $$turns --seconds 3 --json "$$t/bench-remote/ceph.json"; \
		scripts/ceph_speed.py "$$t/release/pvblk" --cache --sizes 4k --turns $$turns --seconds 2 --json "$$t/bench-remote/cache.json"; \
		scripts/nbd_speed.py "$$t/release/pvblk" --turns $$turns --seconds 2 --json "$$t/bench-remote/nbd.json"

md: ## Compare RAID-5 with the kernel's md in user-mode Linux, members in memory (8 minutes)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" md --check

lab: ## Run the experiments on rings, queues, stripes and page caches, print each expected figure, compare bench with fio (more than an hour, of which rings take 45 minutes; needs a quiet machine)
	@scripts/install-tools.sh test
	@$(MAKE) --no-print-directory release
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" rings --check
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" queues --check
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" stripe-queue --on modelled --check
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" page-order --quick --on modelled --check
	@"$${CARGO_TARGET_DIR:-target}/release/pvblk-lab" fio --check

crash: ## Kill servers and front ends 10000 times in the middle of writes to a slow medium, over all exports and volumes: no flushed write may be lost (as root, 30 minutes)
	@$(MAKE) --no-print-directory release
	@cargo build --release --locked -p pvblk-e2e --example slow_medium
	@scripts/crash.sh $(or $(CYCLES),10000)

state-crash: ## Kill servers in the middle of commands, CYCLES times (1000): the next one has the old or the new state (3 minutes)
	@$(MAKE) --no-print-directory release
	@PVBLK_STATE_CYCLES=$(or $(CYCLES),1000) cargo test -p pvblk-e2e --locked --test state -- kills

neighbours: ## Measure a disk's latency while its neighbour is attacked in each of the ways of docs/security.md (as root, 10 minutes)
	@$(MAKE) --no-print-directory release
	@cargo build --release --locked -p pvblk-e2e --example slow_medium
	@python3 scripts/neighbours/measure.py "$${CARGO_TARGET_DIR:-target}/release/pvblk" \
		"$${CARGO_TARGET_DIR:-target}/release/examples/slow_medium"

sim: ## Run the simulation: 100000 seeds of rings with crashes at any step, 5000 of an array, 20000 of a cache, 100000 of squeezed pools, 100000 of stops (half an hour)
	@cargo run --release --locked -p pvblk-sim -- --seeds 100000
	@cargo run --release --locked -p pvblk-sim -- raid --seeds 5000
	@cargo run --release --locked -p pvblk-sim -- cache --seeds 20000
	@cargo run --release --locked -p pvblk-sim -- squeeze --seeds 100000
	@cargo run --release --locked -p pvblk-sim -- stop --seeds 100000

model: ## Search the models of RAID-5's checksums and write path for all sets of three requests, with failures and power cuts at every step (half an hour; an hour and a quarter beside other work)
	@cargo run --release --locked -p pvblk-raid5-model -- all

asan: ## Run the simulations of squeezed pools, caches and arrays under AddressSanitizer, 5000 seeds each (15 minutes)
	@scripts/asan.sh 5000

advisories: ## Ask the advisory database about the dependencies (needs the network)
	@scripts/install-tools.sh test
	@cargo deny --locked check advisories

publish-check: ## Pack the library pvblk-disk and the crates that it is made of, and build them as a registry would (needs the network)
	@cargo publish --workspace --dry-run --locked

fmt: ## Format the sources
	@cargo fmt --all

clean: ## Remove the results of builds
	@cargo clean
	@rm -rf fuzz/artifacts

release: ## Build the command, pvblk, and the experiments, pvblk-lab
	@cargo build --release --locked -p pvblk
	@cargo build --release --locked -p pvblk-lab

deb: ## Build the Debian package, in target/deb
	@scripts/install-tools.sh deb
	@$(MAKE) --no-print-directory release
	@scripts/deb.sh "$${CARGO_TARGET_DIR:-target}/release/pvblk" "$${CARGO_TARGET_DIR:-target}/deb"

dist: ## Make the files of a release from the last commit, in target/dist: source, program, package, bill of materials, sums
	@scripts/install-tools.sh dist
	@$(MAKE) --no-print-directory release
	@scripts/dist.sh "$${CARGO_TARGET_DIR:-target}/release/pvblk" "$${CARGO_TARGET_DIR:-target}/dist"

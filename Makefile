# Thin names for scripts/*, which also run without make.
.PHONY: run test test-all test-matrix test-faults soak check bench bench-router bench-peers check-api check-clients check-load check-newcomer check-arm check-sanitizers audit fuzz gpu-check gpu-bench install clean

run: ; @scripts/run
test: ; @scripts/test
test-all: ; @scripts/test-all
test-matrix: ; @scripts/test-matrix
test-faults: ; @scripts/test-faults
check: ; @scripts/check
bench: ; @scripts/bench
bench-router: ; @scripts/bench-router
bench-peers: ; @scripts/bench-peers
check-api: ; @scripts/check-api
check-clients: ; @scripts/check-clients
check-load: ; @scripts/check-load
check-newcomer: ; @scripts/check-newcomer
check-arm: ; @scripts/check-arm
check-sanitizers: ; @scripts/check-sanitizers
audit: ; @scripts/audit
fuzz: ; @scripts/fuzz $(if $(SECONDS),--seconds $(SECONDS))
soak: ; @scripts/soak $(if $(MINUTES),--minutes $(MINUTES))
gpu-check: ; @scripts/gpu-check
gpu-bench: ; @scripts/gpu-bench
install: ; @scripts/install
clean: ; rm -rf .venv .venv-audit .venv-gpu build dist bench-results .bench-peers .check-api .check-arm .check-clients .pytest_cache .ruff_cache .hypothesis .import_linter_cache

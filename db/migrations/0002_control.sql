-- A third phase: the second entry of a contestant that runs twice in a final (A/A control).
-- SQLite cannot change a CHECK: the table is made anew, and with it the one that refers to it.
-- Copies and no renaming, which fails where somebody's view reads one of ours. Rows that break a
-- rule (another program may write) are left behind, so that the others stay readable.

DROP VIEW measurement_row;
CREATE TEMP TABLE measurement_before AS SELECT * FROM measurement;
CREATE TEMP TABLE verification_before AS SELECT * FROM verification;
DROP TABLE verification;
DROP TABLE measurement;

CREATE TABLE measurement (
    id INTEGER PRIMARY KEY,
    run_id INTEGER NOT NULL REFERENCES run (id),
    trial INTEGER NOT NULL,
    utc TEXT NOT NULL,
    protocol INTEGER NOT NULL,
    m INTEGER NOT NULL,
    k INTEGER NOT NULL,
    h INTEGER NOT NULL,
    n INTEGER NOT NULL,
    gpus INTEGER NOT NULL,
    dtype TEXT NOT NULL,
    activation TEXT NOT NULL,
    output TEXT NOT NULL,
    config_key TEXT NOT NULL REFERENCES config (key),
    kernel_id INTEGER REFERENCES kernel (id),
    load TEXT NOT NULL CHECK (load IN ('sustained', 'burst')),
    cache TEXT NOT NULL CHECK (cache IN ('cold', 'warm')),
    phase TEXT NOT NULL CHECK (phase IN ('screen', 'final', 'control')),
    outcome TEXT NOT NULL CHECK (
        outcome IN ('ok', 'invalid', 'compile_error', 'launch_error', 'wrong', 'timeout', 'throttled')
    ),
    detail TEXT NOT NULL,
    latency_us REAL,
    low_us REAL,
    high_us REAL,
    samples_us TEXT NOT NULL,
    floor_us REAL,
    single_shot_us REAL,
    gpu_state TEXT NOT NULL,
    UNIQUE (run_id, trial)
);
INSERT OR IGNORE INTO measurement SELECT * FROM measurement_before
WHERE run_id IN (SELECT id FROM run)
    AND config_key IN (SELECT key FROM config)
    AND (kernel_id IS NULL OR kernel_id IN (SELECT id FROM kernel));

CREATE TABLE verification (
    measurement_id INTEGER PRIMARY KEY REFERENCES measurement (id),
    passed INTEGER NOT NULL CHECK (passed IN (0, 1)),
    seed INTEGER NOT NULL,
    relative_error REAL,
    worst_error REAL,
    nans INTEGER NOT NULL,
    bitwise_equal INTEGER CHECK (bitwise_equal IN (0, 1))
);
INSERT OR IGNORE INTO verification SELECT * FROM verification_before
WHERE measurement_id IN (SELECT id FROM measurement);

DROP TABLE verification_before;
DROP TABLE measurement_before;
CREATE INDEX measurement_shape ON measurement (m, k, h, n);
CREATE INDEX measurement_config ON measurement (config_key);

CREATE VIEW measurement_row AS
SELECT
    measurement.id, measurement.trial, measurement.utc, measurement.protocol,
    described_run.*,
    measurement.m AS "problem.m", measurement.k AS "problem.k", measurement.h AS "problem.h",
    measurement.n AS "problem.n", measurement.gpus AS "problem.gpus",
    measurement.dtype AS "problem.dtype",
    measurement.activation AS "problem.activation", measurement.output AS "problem.output",
    config.canonical AS config,
    measurement.load AS "measurement.regime.load", measurement.cache AS "measurement.regime.cache",
    measurement.phase AS "measurement.phase",
    measurement.outcome AS "measurement.outcome",
    measurement.detail AS "measurement.detail",
    measurement.latency_us AS "measurement.latency_us",
    measurement.low_us AS "measurement.low_us",
    measurement.high_us AS "measurement.high_us",
    measurement.samples_us AS "measurement.samples_us",
    measurement.floor_us AS "measurement.floor_us",
    measurement.single_shot_us AS "measurement.single_shot_us",
    measurement.gpu_state AS "measurement.gpu_state",
    kernel.hash AS "measurement.kernel.hash",
    kernel.compiler AS "measurement.kernel.compiler",
    kernel.registers AS "measurement.kernel.registers",
    kernel.local_bytes AS "measurement.kernel.local_bytes",
    kernel.smem_bytes AS "measurement.kernel.smem_bytes",
    verification.passed AS "measurement.verification.passed",
    verification.seed AS "measurement.verification.seed",
    verification.relative_error AS "measurement.verification.relative_error",
    verification.worst_error AS "measurement.verification.worst_error",
    verification.nans AS "measurement.verification.nans",
    verification.bitwise_equal AS "measurement.verification.bitwise_equal"
FROM measurement
JOIN described_run ON described_run."run.id" = measurement.run_id
JOIN config ON config.key = measurement.config_key
LEFT JOIN kernel ON kernel.id = measurement.kernel_id
LEFT JOIN verification ON verification.measurement_id = measurement.id;

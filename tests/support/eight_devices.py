"""The environment in which JAX has eight devices in host memory."""

ENVIRONMENT = {
    # XLA ends a process whose eight threads do not meet within 40 seconds, as may happen where few processors are free.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_warn_stuck_timeout_seconds=300 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "JAX_PLATFORMS": "cpu",
    # XLA's threads; by default one for each device. Now and then seven wait in a collective operation, and the part of
    # the eighth device stays behind one of them: they never meet.
    "PJRT_NPROC": "32",
}

"""Tables of system calls that sandboxes deny, with their numbers on x86_64 and aarch64.

The numbers are those of the kernel's headers. A test compares them with the headers of the machine.
"""

from antiphon.sandbox.isolation import kernel

# name: (x86_64, aarch64); None where the architecture has no such call
SyscallTable = dict[str, tuple[int | None, int | None]]

SOCKET = (41, 198)
# Asynchronous I/O: the whole machine shares its contexts (fs.aio-max-nr), and no per-process limit counts them.
SHARED: SyscallTable = {
    "io_setup": (206, 0),
    "io_destroy": (207, 1),
    "io_submit": (209, 2),
    "io_cancel": (210, 3),
    "io_getevents": (208, 4),
    "io_pgetevents": (333, 292),
}
# Calls that read or change other processes.
PROCESSES: SyscallTable = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "ioprio_set": (251, 30),
}
# Calls that send signals to the process or thread that their first argument names. The filter of trusted code limits them.
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
PIDFD_SEND_SIGNAL = (424, 424)
FCNTL = (72, 25)
DENIED: SyscallTable = (
    SHARED
    | PROCESSES
    | {
        # the network, and communication with other processes by name
        "socket": SOCKET,
        "shmget": (29, 194),
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "semget": (64, 190),
        "semop": (65, 193),
        "semctl": (66, 191),
        "semtimedop": (220, 192),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "msgrcv": (70, 188),
        "msgctl": (71, 187),
        "mq_open": (240, 180),
        "mq_unlink": (241, 181),
        # watches: all processes of a user share a few (fs.inotify.max_user_instances), and sandboxes may share a user
        "inotify_init": (253, None),
        "inotify_init1": (294, 26),
        # flush what every process of the machine has written, and wait for it
        "sync": (162, 81),
        "syncfs": (306, 267),
        # large and often faulty parts of the kernel
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "bpf": (321, 280),
        "keyctl": (250, 219),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "fanotify_init": (300, 262),
        "fanotify_mark": (301, 263),
        "mbind": (237, 235),
        "set_mempolicy": (238, 237),
        "set_mempolicy_home_node": (450, 450),
        "personality": (135, 92),
        "modify_ldt": (154, None),
        "lookup_dcookie": (212, 18),
        # memory that no limit of the process counts
        "memfd_create": (319, 279),
        "memfd_secret": (447, 447),
        # namespaces and mounts
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "statmount": (457, 457),
        "listmount": (458, 458),
        "open_tree_attr": (467, 467),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "quotactl": (179, 60),
        "quotactl_fd": (443, 443),
        # the machine
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "reboot": (169, 142),
        "syslog": (103, 116),
        "acct": (163, 89),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "vhangup": (153, 58),
        "iopl": (172, None),
        "ioperm": (173, None),
        "uselib": (134, None),
        "sysfs": (139, None),
        "_sysctl": (156, None),
    }
)
# Calls that change a file without opening it.
ATTRIBUTES: SyscallTable = {
    "chmod": (90, None),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
# Calls of which only some uses are denied; `seccomp` and `docker_profile` say which.
CONDITIONAL = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "ioctl": (16, 29),
    "socketpair": (53, 199),
    "setsockopt": (54, 208),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
}
ALL_NAMESPACES = (
    kernel.NEW_MOUNTS | kernel.NEW_CGROUP | kernel.NEW_UTS | kernel.NEW_IPC | kernel.NEW_USER | kernel.NEW_PIDS
) | kernel.NEW_NETWORK
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
# Requests that name the process which gets a signal when a descriptor is ready: of fcntl, and of ioctl.
F_SETOWN, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP = 8, 15, 0x8901, 0x8902
SOL_SOCKET, SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF = 1, 26, 51

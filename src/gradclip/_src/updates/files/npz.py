""".npz: a zip archive of .npy files, stored or deflated."""

from gradclip._src.updates.files import npy
from gradclip._src.updates.files.arrays import FileArray
from gradclip._src.updates.files.source import Source
from gradclip._src.updates.files.stored import shown
from gradclip._src.updates.files.zips import Member, MemberBytes

_SUFFIX = ".npy"


def read(source: Source, members: list[Member]) -> list[FileArray]:
    """Return the arrays of an archive. Those that are not measured are read here, for their checksums."""
    found: dict[str, FileArray] = {}
    for member in members:
        one = _array(source, member)
        if one.name in found:
            source.refuse(f"it has two arrays named '{shown(one.name)}'.")
        found[one.name] = one
    return list(found.values())


def _array(source: Source, member: Member) -> FileArray:
    packed = MemberBytes(source, member)
    start = packed.start(npy.LONGEST)
    if not start.startswith(npy.MAGIC):
        source.refuse(f"the member '{shown(member.name)}' is no array. An .npz file holds only .npy files.")
    try:
        header = npy.header_of(start)
    except ValueError as error:
        source.refuse(f"'{shown(member.name)}': {error}")
    if header.start + header.size != member.size:
        source.refuse(
            f"'{shown(member.name)}': its header promises {header.size} bytes, but the archive holds "
            f"{member.size - header.start}. It is damaged."
        )
    packed.skip = header.start
    if not header.kind.counts:
        packed.check_all()
    return FileArray(member.name.removesuffix(_SUFFIX), header.kind, header.layout, packed)

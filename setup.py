"Package metadata, read from settings.ini: the one place that holds it"
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

ini = ConfigParser(delimiters=['='])
ini.read('settings.ini', encoding='utf-8')
cfg, readme = ini['DEFAULT'], Path('README.md')
setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    author=cfg['author'], author_email=cfg['author_email'], license='Apache-2.0',
    long_description=readme.read_text(encoding='utf-8') if readme.exists() else '',
    long_description_content_type='text/markdown', python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=['laminar_sdk', 'laminar_sdk.*']), include_package_data=True,
    package_data={'laminar_sdk': ['assets/**/*']},
    install_requires=cfg['requirements'].split(),
    extras_require={extra: cfg[f'{extra}_requirements'].split() for extra in ('cpu', 'gpu', 'demo', 'gym', 'verifiers', 'rdma', 'dev')},
    entry_points={'console_scripts': [cfg['console_scripts']],
                  'vllm.general_plugins': ['laminar_relay=laminar_sdk.rollout.vllm_relay:register'],
                  'nbdev': [f"{cfg['lib_path']}=laminar_sdk._modidx:d"]})
